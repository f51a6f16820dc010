"""A sweep on a CUDA device: calls that were kept in host memory, replayed by ranks that share the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.test_replay_cuda import RANKS, Net
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.checkpoint.gate import SweepResult
from torchscout.config import CheckpointConfig, Parallelism, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 3


def swept(
    rank: int, run_dir: Path, faults: FaultPlan
) -> tuple[SweepResult, str | None, bool, list, list[bool], int]:
    """What a sweep after some steps shows, and whether it has changed anything."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Injector(faults, rank, model, optimizer) as injector:
        session = enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1),
            observer=None,
            checkpoint=CheckpointConfig(run_dir / "checkpoints"),
            parallelism=Parallelism(replica=RANKS),
            run_dir=run_dir,
        )
        assert session._replay is not None
        assert session._checkpoints is not None
        saved = session._checkpoints.saved_calls
        for step in range(STEPS):
            tokens = torch.randint(100, (4, 17), generator=torch.Generator().manual_seed(step)).cuda()
            logits = model(tokens[:, :-1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        before = bits(model, optimizer)
        found = session._replay.driver.sweep(STEPS, everything=True)
        is_same = bits(model, optimizer) == before
    in_host_memory = [each.is_cpu for key in saved for each in saved[key].tensors]
    named = [each.ranks for each in session.incidents]
    return found.sweep, found.unswept, is_same, named, in_host_memory, len(injector.fired)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    state = [*model.parameters(), *slots, torch.get_rng_state(), torch.cuda.get_rng_state()]
    return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in state)


def test_healthy_ranks_sweep_clean_and_nothing_changes(tmp_path: Path):
    ranks = run_ranks(swept, RANKS, tmp_path, FaultPlan(), timeout=240)
    for found, unswept, is_same, named, _, _ in ranks:
        assert (found, unswept, named) == (SweepResult.CLEAN, None, [])
        assert is_same
    in_host_memory = [is_cpu for each in ranks for is_cpu in each[4]]
    assert in_host_memory
    assert all(in_host_memory)


def test_a_rank_that_is_wrong_in_one_layer_is_named(tmp_path: Path):
    # In the last step this layer is not due: only the sweep comes to it again.
    faults = FaultPlan().flip_bit(rank=2, at="layers.1/output", step=STEPS, bit=20, calls=range(1, 200))
    found = run_ranks(swept, RANKS, tmp_path, faults, timeout=240)
    assert found[2][-1], "the fault has fired"
    assert {each[0] for each in found} == {SweepResult.SDC}
    assert found[0][3] == [(2,)]
