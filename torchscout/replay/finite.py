"""Finds NaN and infinity in trained state: peers may agree on numbers that are useless (paper, section 8).

A job that diverges writes NaN into the weights of all replicas alike, so that every comparison agrees. Such
state must not be certified: a restart would go back to it. Only parameters that are trained and the state of
their optimizers count. Buffers and frozen parameters may hold infinity by design, as attention masks do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.replay.recipe import Recipe
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.state.table import Row
from torchscout.utils.text import listed

__all__ = ["FINITE", "FiniteState", "not_finite"]

FINITE = "state/finite"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_NAMED = 3
_NOT_LOOKED_AT = "torchscout could not look for NaN and infinity: such state is not certified"


class FiniteState:
    """Whether the state of this rank is finite at one moment.

    The devices compute it in the order of their streams; ``problem`` waits for them.
    """

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        """Look at the state that these recipes compare or watch."""
        states = [
            each.state() for each in recipes if isinstance(each, ReplicatedStateRecipe | OwnedStateRecipe)
        ]
        rows = [row for state in states for row in state.values()]
        self._parts = {row.name: row.local.detach() for row in rows if _is_readable(row)}
        self._norms: list[torch.Tensor] = []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for part in self._parts.values():
            by_device.setdefault(part.device, []).append(part)
        with torch.no_grad():
            for parts in by_device.values():
                # The largest magnitude: NaN if there is any, and no sum that could overflow.
                self._norms.append(torch.nn.utils.get_total_norm(parts, torch.inf))

    def problem(self) -> str | None:
        """Say which tensors are not finite; None if all are."""
        if all(bool(torch.isfinite(each)) for each in self._norms):
            return None
        wrong = [name for name, part in self._parts.items() if not bool(torch.isfinite(part).all())]
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        return f"NaN or infinity in {listed(wrong[:_MOST_NAMED])}{more}: such state is not certified"


def not_finite(state: FiniteState | None, step: int, rank: int) -> list[EvidenceRecord]:
    """Return a record of what is wrong with the state of a rank, if anything is. None stands for state that
    could not be looked at, which is not certified either."""
    problem = _NOT_LOOKED_AT if state is None else state.problem()
    if problem is None:
        return []
    record = EvidenceRecord(
        step=step, surface=FINITE, manifestation=Manifestation.SDC, peers=(rank,), reason=problem
    )
    return [record]


def _is_readable(row: Row) -> bool:
    """Whether this rank has numbers of a tensor that count."""
    if isinstance(row.tensor, torch.nn.Parameter) and not row.tensor.requires_grad:
        return False
    local = row.local
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.dtype not in _DTYPES:
        return False
    if local.is_meta or local.layout is not torch.strided or not local.numel():
        return False
    return bool(local.untyped_storage().nbytes())  # FSDP and ZeRO free what they do not need
