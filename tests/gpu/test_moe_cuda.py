"""Experts on the kernel that counts its paths, trained on CUDA and replayed at the shapes of a catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.decision.types import Scope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, EXPERTS, HIDDEN, INTERMEDIATE, STEPS = 3, 2, 64, 128, 8
ROWS = (1, 600)


class Routed(nn.Module):
    """Every token goes to one expert, by its number: routing as uneven as the tokens are."""

    def __init__(self) -> None:
        from torchscout.experts.kernel.expert_layer import Experts

        super().__init__()
        self.tokens = nn.Embedding(50, HIDDEN)
        self.experts = Experts(EXPERTS, HIDDEN, INTERMEDIATE)
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten()
        order = (flat % 7 == 0).long().argsort(stable=True)
        counts = torch.bincount((flat % 7 == 0).long(), minlength=EXPERTS)
        computed = self.experts(self.tokens(flat)[order], counts)
        return self.head(computed[order.argsort()])


def catalog(path: Path) -> list[int]:
    """Of every number of rows up to 600; those that are selected."""
    from torchscout.experts.catalog import Catalog, Places, save
    from torchscout.experts.coverage import tabulated, uniform
    from torchscout.experts.discovery import discover
    from torchscout.experts.kernel.profiler import KernelProfiler

    tables = []
    for inner, outer in ((HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
        profiler = KernelProfiler(inner, outer, EXPERTS)
        shapes = [uniform(rows, EXPERTS) for rows in range(ROWS[0], ROWS[1] + 1)]
        seen = discover(profiler, shapes)
        tables.append(tabulated(f"{inner}x{outer}", profiler.facts(), "1:600", seen))
    found = Catalog(tuple(tables), (Places(("*",), EXPERTS, 1, (0, 1)),))
    save(found, path)
    return [rows[0] for rows in found.representatives("experts", 0)]


def train(rank: int, path: Path | None, run_dir: Path | None, sick: int) -> tuple[bytes, dict, list, int]:
    """``sick`` is the number of rows at which rank 1 computes something else, when it is replayed."""
    torch.manual_seed(0)
    model = Routed().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    fired = 0

    def spoil(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal fired
        if rank != 1 or len(args[0]) != EXPERTS * sick:
            return None
        fired += 1
        return output * 1.5

    model.experts.register_forward_hook(spoil)
    session = None
    if run_dir is not None:
        session = enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1, recipes=("experts",), expert_catalog=path),
            observer=None,
            parallelism=Parallelism(replica=RANKS),
            run_dir=run_dir,
        )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(50, (4, 16), generator=generator).cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.flatten()).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= RANKS
        optimizer.step()
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    if session is None:
        return bits, {}, [], fired
    status, incidents = dict(session.status()), list(session.incidents)
    assert session.failures == []
    session.close()
    return bits, status, [(each.scope, each.ranks, each.records[0].layer) for each in incidents], fired


def test_a_fault_at_one_shape_of_the_catalog_is_found_on_the_device(tmp_path: Path):
    path = tmp_path / "catalog.json"
    rows = catalog(path)
    assert 2 <= len(rows) <= 8, rows
    alone = run_ranks(train, RANKS, None, None, 0, timeout=300)
    clean = run_ranks(train, RANKS, path, tmp_path / "clean", 0, timeout=300)
    for (bits, _, _, _), (checked, status, incidents, fired) in zip(alone, clean, strict=True):
        assert (checked == bits, incidents, fired) == (True, [], 0)
        assert status["replay"]["lacking"] is None
        assert status["replay"]["coverage"]["experts"]["targets"] == len(rows)
        assert status["replay"]["coverage"]["experts"]["cycles"] >= 1
    sick = run_ranks(train, RANKS, path, tmp_path / "sick", rows[-1], timeout=300)
    assert [each[3] > 0 for each in sick] == [False, True, False]
    assert sick[0][2] == [(Scope.RANK, (1,), f"experts x{rows[-1]}")]
