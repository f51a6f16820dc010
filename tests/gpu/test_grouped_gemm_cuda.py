"""On a CUDA device: the compiled grouped GEMM computes, counts and can be perturbed as in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.grouped_gemm_oracle import counts_of, reference, worst_error
from torchscout.campaign.cells.cell import Cell
from torchscout.campaign.cells.kernel_process import perturb_all
from torchscout.campaign.cells.paper_cells import WORK
from torchscout.experts.kernel.expert_layer import Experts, grouped_linear
from torchscout.experts.launch_profiler import LaunchProfiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    (128, 128, (0,)),
    (128, 128, (1,)),
    (128, 128, (3456,)),
    (128, 128, (3391,)),
    (128, 128, (0, 1, 63, 64, 65, 127, 128, 129, 0, 0, 200, 512, 1000, 2048, 31, 0)),
    (128, 128, (2048,) * 16),
    (6144, 10752, (300,)),
    (6144, 10752, (2048,)),
    (5120, 1536, (1000, 24)),
    (2048, 1024, (2047,)),
    (100, 333, (77, 0, 130)),
    (1, 1, (3, 0, 200)),
]
"""Hidden, intermediate, rows of each expert."""


class Operands:
    """Random operands of one shape, and results that were poisoned before they were computed."""

    def __init__(self, hidden: int, intermediate: int, rows: tuple[int, ...]) -> None:
        from torchscout.experts.kernel.grouped_gemm import GroupedGemm, programs_of

        generator = torch.Generator("cuda").manual_seed(sum(rows))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        self.rows, self.placed = rows, torch.tensor(rows, dtype=torch.int32, device="cuda")
        self.x, self.gradient = random(sum(rows), hidden), random(sum(rows), intermediate)
        self.weights = random(len(rows), hidden, intermediate)
        self.gemm = GroupedGemm(hidden, intermediate, programs=programs_of(torch.device("cuda")))

    def results(self, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        from torchscout.experts.kernel.work_items import Pass

        passes = {
            Pass.FORWARD: (self.x, self.weights, self.gradient),
            Pass.INPUT_GRADIENT: (self.gradient, self.weights, self.x),
            Pass.WEIGHT_GRADIENT: (self.x, self.gradient, self.weights),
        }
        found = {}
        for which, (a, b, like) in passes.items():
            out = found[which.word] = torch.full_like(like, torch.nan)
            self.gemm.launch(which, (a, b, out), self.placed, **kwargs)
        return found

    def expected(self) -> dict[str, torch.Tensor]:
        return reference(self.x, self.weights, self.gradient, self.rows)


@pytest.fixture(autouse=True)
def no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("hidden", "intermediate", "rows"), SHAPES)
def test_all_three_results_are_those_of_torch(hidden, intermediate, rows):
    operands = Operands(hidden, intermediate, rows)
    expected = operands.expected()
    errors = {which: worst_error(result, expected[which]) for which, result in operands.results().items()}
    assert max(errors.values()) < 2**-8, errors


@pytest.mark.parametrize(("hidden", "intermediate", "rows"), SHAPES)
def test_counting_perturbing_nothing_and_running_again_give_the_same_bits(hidden, intermediate, rows):
    from torchscout.experts.kernel.grouped_gemm import FAULT_WORDS

    operands = Operands(hidden, intermediate, rows)
    plain = operands.results()
    none = torch.full((FAULT_WORDS,), -1, dtype=torch.int32, device="cuda")
    variants = [
        operands.results(),
        operands.results(counters=torch.zeros(16, dtype=torch.int32, device="cuda")),
        operands.results(fault=none),
    ]
    for variant in variants:
        for which, result in plain.items():
            assert torch.equal(result.view(torch.int16), variant[which].view(torch.int16)), which
    assert none.tolist() == [-1] * FAULT_WORDS


@pytest.mark.parametrize(("hidden", "intermediate", "rows"), SHAPES)
def test_every_path_is_counted_as_often_as_the_shape_calls_for_it(hidden, intermediate, rows):
    from torchscout.experts.kernel.profiler import KernelProfiler

    profiler = KernelProfiler(hidden, intermediate, len(rows))
    gemm = profiler.projection.gemm
    tilings = {which.word: tiling for which, tiling in gemm.tilings.items()}
    profiles = [profiler.profile(rows) for _ in range(3)]
    assert dict(profiles[0].path_counts) == counts_of(rows, hidden, intermediate, tilings, gemm.programs)
    assert profiles[0] == profiles[1] == profiles[2]


def test_the_facts_name_device_driver_and_kernel():
    from torchscout.experts.kernel.profiler import KernelProfiler

    profiler = KernelProfiler(128, 128)
    facts = profiler.facts()
    assert facts["device"] == torch.cuda.get_device_name()
    assert facts["driver"].split(".")[0].isdigit()
    assert len(facts["kernel"]) == 64
    idle, full = (profiler.profile((rows,)).fingerprint for rows in (128, 128 * 132 * 2))
    assert "kernel=interpreted" not in idle
    assert idle.count("idle") == 3
    assert full.count("full") == 2


@pytest.mark.parametrize("rows", [(0,), (1,), (700,), (319, 0, 64, 128)])
def test_every_work_item_shows_in_a_result(rows):
    from torchscout.experts.kernel.grouped_gemm import Projection
    from torchscout.experts.kernel.perturbation import qualify

    found = qualify(Projection(128, 128, len(rows), device="cuda"), [rows])
    assert found.complete, found
    assert found.injected >= len(rows)


def test_expert_layers_train_on_it():
    torch.manual_seed(0)
    experts = Experts(3, 256, 320, device="cuda")
    x = torch.randn(500, 256, device="cuda", requires_grad=True)
    wanted = torch.randn(500, 256, device="cuda")
    rows = torch.tensor([200, 0, 300], device="cuda")
    out = experts(x, rows)
    (out * wanted).sum().backward()
    leaves = [x, experts.up, experts.down]
    plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    split = plain[0].split(rows.tolist())
    parts = [functional.silu(part @ up) @ down for part, up, down in zip(split, *plain[1:], strict=True)]
    expected = torch.cat(parts)
    (expected * wanted).sum().backward()
    assert worst_error(out.detach(), expected.detach()) < 0.03
    for leaf, other in zip(leaves, plain, strict=True):
        assert worst_error(leaf.grad, other.grad) < 0.03


def test_rows_on_the_device_and_on_the_host_give_the_same_bits():
    x, weights = (
        torch.randn(300, 64, device="cuda").bfloat16(),
        torch.randn(2, 64, 96, device="cuda").bfloat16(),
    )
    on_host = grouped_linear(x, weights, [120, 180])
    assert torch.equal(on_host, grouped_linear(x, weights, torch.tensor([120, 180], device="cuda")))
    with pytest.raises(ValueError, match=r"add up to the 300 rows of x, got \[120, 181\]"):
        grouped_linear(x, weights, [120, 181])


@pytest.mark.parametrize("projection", ["up", "down"])
def test_every_work_item_of_the_campaigns_shapes_shows_when_it_is_perturbed(projection: str):
    found = perturb_all(Cell("moe-kernel", f"{WORK}-{projection}", "alone"))
    assert found.grade.passed, found.grade.reason


def test_closed_kernels_are_named_and_not_compressed():
    expert = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    profiler = LaunchProfiler(expert, 256)
    assert profiler.profile((64, 32)) is None
    assert "closed kernels do not count their paths" in profiler.reason
    assert "grid" in profiler.reason
