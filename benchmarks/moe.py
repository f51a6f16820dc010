"""What it costs that the grouped GEMM counts its paths, and how fast it is next to torch's own.

    python benchmarks/moe.py [--part NAME ...] [--json] [--output FILE]

``passes`` times forward, input gradient and weight gradient, each without and with counters and as
``torch._grouped_mm``, on the same operands. Launches are captured into CUDA graphs, so that what the host
does between kernels is left out; graphs are replayed in turn within one run and a figure is the median. A
ratio is of speeds: ours to the other's. ``layer`` times forward and backward of an expert layer end to end,
host and all. ``sweep`` times other tilings.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from reporting import environment, heading, parser_of, publish
from torch.nn import functional

from torchscout.experts.kernel.expert_layer import Experts
from torchscout.experts.kernel.grouped_gemm import GroupedGemm, Tiling, programs_of
from torchscout.experts.kernel.work_items import Pass

ROUNDS = 15
AT_LEAST_MS = 2.0
"""What one replay takes, whatever the size: enough for the clock."""
COUNTED_GOAL = 0.8

Figures = dict[str, dict[str, Any]]


class Size(NamedTuple):
    hidden: int
    intermediate: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        same = len(set(self.rows)) == 1
        each = f"{self.rows[0]}" if same else f"{min(self.rows)}..{max(self.rows)}"
        return f"{self.hidden}x{self.intermediate}, {len(self.rows)} x {each} rows"


UNEVEN = tuple(64 + 61 * place % 1900 for place in range(32))
SIZES = [
    Size(128, 128, (3456,)),
    Size(128, 128, (2048,) * 16),
    Size(2048, 1024, (2048,)),
    Size(5120, 1536, (1024,)),
    Size(6144, 10752, (2048,)),
    Size(2048, 1024, (1024,) * 16),
    Size(4096, 2048, UNEVEN),
    Size(6144, 10752, (1024,) * 8),
]
SWEPT = [Size(6144, 10752, (2048,)), Size(4096, 2048, (1024,) * 16)]
TILINGS = [
    Tiling(128, 256, 64, 8, 8, 3),
    Tiling(128, 256, 64, 8, 8, 4),
    Tiling(128, 128, 64, 8, 8, 4),
    Tiling(128, 128, 64, 8, 4, 4),
    Tiling(256, 128, 64, 8, 8, 3),
]


def main() -> None:
    arguments = parser_of(__doc__, PARTS).parse_args()
    report: dict[str, Any] = {
        **environment("torch", "triton", on_cuda=True),
        "results": {name: PARTS[name]() for name in arguments.part or ("passes", "layer")},
    }
    publish(report, table, arguments)


class Operands:
    """Random operands of one size, and what is run on them."""

    def __init__(self, size: Size, tiling: Tiling | None = None) -> None:
        total = sum(size.rows)
        self.x, self.gradient = _random(total, size.hidden), _random(total, size.intermediate)
        self.weights = _random(len(size.rows), size.hidden, size.intermediate)
        self.rows = torch.tensor(size.rows, dtype=torch.int32, device="cuda")
        self.ends = self.rows.cumsum(0, dtype=torch.int32)
        self.counters = torch.zeros(16, dtype=torch.int32, device="cuda")
        programs = programs_of(torch.device("cuda"))
        self.gemm = GroupedGemm(size.hidden, size.intermediate, programs=programs, tiling=tiling)

    def ours(self, which: Pass, *, counted: bool) -> Callable[[], torch.Tensor]:
        a, b, like = {
            Pass.FORWARD: (self.x, self.weights, self.gradient),
            Pass.INPUT_GRADIENT: (self.gradient, self.weights, self.x),
            Pass.WEIGHT_GRADIENT: (self.x, self.gradient, self.weights),
        }[which]
        out = torch.empty_like(like)
        counters = self.counters if counted else None

        def run() -> torch.Tensor:
            self.gemm.launch(which, (a, b, out), self.rows, counters=counters)
            return out

        return run

    def theirs(self, which: Pass) -> Callable[[], torch.Tensor]:
        a, b = {
            Pass.FORWARD: (self.x, self.weights),
            Pass.INPUT_GRADIENT: (self.gradient, self.weights.transpose(1, 2)),
            Pass.WEIGHT_GRADIENT: (self.x.t(), self.gradient),
        }[which]
        return lambda: torch._grouped_mm(a, b, offs=self.ends)


def passes() -> Figures:
    """Every size and pass, without and with counters in turn, then against torch in turn."""
    figures: Figures = {}
    for size in SIZES:
        operands = Operands(size)
        for which in Pass:
            plain, counted = (operands.ours(which, counted=flag) for flag in (False, True))
            plain_ms, counted_ms = _in_turn(plain, counted)
            flops = 2 * sum(size.rows) * size.hidden * size.intermediate
            row = figures[f"{size}, {which.word}"] = {
                "ms": round(plain_ms, 4),
                "tflops": round(flops / plain_ms / 1e9, 1),
                "counted/uncounted": round(plain_ms / counted_ms, 3),
                "goal": COUNTED_GOAL,
            }
            row |= _against_torch(plain, operands.theirs(which), flops)
            print(f"{size}, {which.word}: {row}", file=sys.stderr, flush=True)
    return figures


def _against_torch(ours: Callable[[], Any], theirs: Callable[[], Any], flops: int) -> dict[str, Any]:
    try:
        error = _difference(ours(), theirs())
    except RuntimeError as refused:  # it has rules of its own on strides and sizes
        return {"ours/torch": None, "refused": str(refused).splitlines()[0]}
    ours_ms, theirs_ms = _in_turn(ours, theirs)
    return {
        "torch_ms": round(theirs_ms, 4),
        "torch_tflops": round(flops / theirs_ms / 1e9, 1),
        "ours/torch": round(theirs_ms / ours_ms, 3),
        "difference": f"{error:.1e}",
    }


def layer() -> Figures:
    """A step of one expert layer as training runs it, next to the same on ``torch._grouped_mm``."""
    figures = {}
    for size in (Size(2048, 1024, (1024,) * 16), Size(4096, 2048, UNEVEN)):
        experts = Experts(len(size.rows), size.hidden, size.intermediate, device="cuda", dtype=torch.bfloat16)
        rows = torch.tensor(size.rows, device="cuda")
        ends = rows.cumsum(0, dtype=torch.int32)
        x, above = _random(sum(size.rows), size.hidden).requires_grad_(), _random(sum(size.rows), size.hidden)
        leaves = [x, experts.up, experts.down]

        def ours(experts: Any = experts, rows: Any = rows, leaves: Any = leaves, above: Any = above) -> None:
            torch.autograd.grad(experts(leaves[0], rows), leaves, above)

        def theirs(ends: Any = ends, leaves: Any = leaves, above: Any = above) -> None:
            between = functional.silu(torch._grouped_mm(leaves[0], leaves[1], offs=ends))
            torch.autograd.grad(torch._grouped_mm(between, leaves[2], offs=ends), leaves, above)

        ours_ms, theirs_ms = _in_turn(ours, theirs, captured=False)
        figures[str(size)] = {
            "ms": round(ours_ms, 3),
            "torch_ms": round(theirs_ms, 3),
            "ours/torch": round(theirs_ms / ours_ms, 3),
        }
    return figures


def sweep() -> Figures:
    """The three passes under other tilings, without counters, in TFLOP/s."""
    figures: Figures = {}
    for size in SWEPT:
        flops = 2 * sum(size.rows) * size.hidden * size.intermediate
        for tiling in TILINGS:
            operands = Operands(size, tiling)
            row = {}
            for which in Pass:
                (milliseconds,) = _in_turn(operands.ours(which, counted=False))
                row[which.word] = round(flops / milliseconds / 1e9, 1)
            figures[f"{size}, {tiling}"] = row
            print(f"{size}, {tiling}: {row}", file=sys.stderr, flush=True)
    return figures


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _in_turn(*works: Callable[[], Any], captured: bool = True) -> list[float]:
    """Median milliseconds of one run of each, in turn; the first rounds warm up."""
    repeats = []
    for work in works:
        work()
        work()  # compiled, and its handles created
        repeats.append(max(1, round(AT_LEAST_MS / max(_timed(work), 1e-3))))
    if captured:
        runs = [_captured(work, times) for work, times in zip(works, repeats, strict=True)]
    else:
        runs = [_repeated(work, times) for work, times in zip(works, repeats, strict=True)]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS + 2):
        for run, count, into in zip(runs, repeats, times, strict=True):
            into.append(_timed(run) / count)
    return [statistics.median(each[2:]) for each in times]


def _captured(work: Callable[[], Any], times: int) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


def _repeated(work: Callable[[], Any], times: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(times):
            work()

    return run


def _timed(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def table(report: dict[str, Any]) -> str:
    lines = [heading(report)]
    for part, figures in report["results"].items():
        lines += ["", part]
        for name, row in figures.items():
            cells = ", ".join(f"{key} {value}" for key, value in row.items() if key != "goal")
            lines.append(f"  {name:48} {cells}")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], Figures]] = {"passes": passes, "layer": layer, "sweep": sweep}

if __name__ == "__main__":
    torch.manual_seed(0)
    main()
