"""What jobs that are checked at every step return: what training left, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.findings import evidence_of
from tests.support.ranks import run_ranks
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.faults.plan import FaultPlan
from torchscout.session.session import Session

UPDATES = {
    f"optimizer/{what}"
    for what in ("input", "param", "slot.exp_avg", "slot.exp_avg_sq", "slot.step", "update", "reproduced")
}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rank."""

    bits: bytes
    """All that training leaves behind on it."""
    records: list[EvidenceRecord]
    """Comparisons of numbers."""
    incidents: list[tuple[str, tuple[int, ...], str, int]]
    """Scope, ranks, surface and step of each."""
    sentences: list[str]
    fired: int
    failures: list[str]
    certified: int | None = None
    """The last step whose state checks have certified."""
    between: tuple[type, ...] = ()
    """The classes of what went from block to block."""
    echoes: dict[str, list[bool]] | None = None
    """For each replay of the first block: whether it gave what training's own pass had given."""

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.records if each.status == "agree"}

    @property
    def unchecked(self) -> set[tuple[str, str | None]]:
        return {(each.surface, each.reason) for each in self.records if each.verdict is None}


def result_of(
    bits: bytes, session: Session | None, fired: int, kinds: Collection[Manifestation] = (Manifestation.SDC,)
) -> Result:
    """Close the session, if there is one, and return its result with incidents of these kinds."""
    if session is None:
        return Result(bits, [], [], [], fired, [])
    dist.barrier()  # the rank that reports an incident has written it
    incidents = [each for each in session.incidents if each.manifestation in kinds]
    certified = session.certified_step
    session.close()
    records = evidence_of(session.run_dir, dist.get_rank())
    return Result(
        bits,
        [each for each in records if each.manifestation is Manifestation.SDC],
        [(each.scope.value, each.ranks, each.records[0].surface, each.step) for each in incidents],
        [each.sentence for each in incidents],
        fired,
        session.failures,
        certified,
    )


def layers_of(first: str) -> set[str]:
    """Return what is compared of a net of two blocks, given the name of a block's first linear layer."""
    parts, linear = ("tokens", "stack.0", "stack.1", "head"), ("norm", first, "down")
    return {
        *(f"{part}/{what}" for part in parts for what in ("input", "parameters", "output")),
        *("stack.0/grad_input", "stack.1/grad_input", "head/grad_input"),
        *(f"stack.{n}.{name}/{what}.grad" for n in (0, 1) for name in linear for what in ("weight", "bias")),
        *("tokens/weight.grad", "head/weight.grad", "head/bias.grad"),
    }


def with_and_without(rank: int, train: Callable[..., Any], trial: Any, run_dir: Path) -> tuple[bool, Any]:
    """Return whether checks leave all bits as they are, and what the job with checks has found."""
    alone = train(rank, trial, None)
    checked = train(rank, trial, run_dir)
    return alone.bits == checked.bits, checked


def faulty(train: Callable[..., Result], trial: Any, faults: FaultPlan, run_dir: Path) -> list[Result]:
    found = run_ranks(train, trial.ranks, trial, run_dir, faults, timeout=120)
    assert sum(each.fired for each in found) >= 1
    assert [each.failures for each in found] == [[]] * trial.ranks
    return found


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return the bytes of parameters, gradients, optimizer state and the random state on this rank."""
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [*model.parameters(), *gradients, *slots, torch.get_rng_state()]
    local = (local_of(each).detach().contiguous().flatten() for each in tensors)
    return b"".join(each.view(torch.uint8).numpy().tobytes() for each in local)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
