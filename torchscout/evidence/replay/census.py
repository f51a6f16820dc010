"""Compares all state that peers hold copies of: parameters and optimizer slots (paper, section 5.2).

Nothing is replayed or broadcast: replicas start equal and apply equal updates, so that equality itself is the
evidence. A wrong weight that no replayed layer has met yet is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from torchscout.decision.record import Surface
from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import Broadcast
from torchscout.evidence.replay.recipe import Comparison, Given, Mode, Observation
from torchscout.mesh import Role

__all__ = ["CensusRecipe", "State", "slots_of"]

State = Callable[[], Mapping[str, Mapping[Surface, torch.Tensor]]]
"""The tensors as they are now, by what they are: ``parameters``, ``optimizer``."""


def slots_of(
    surfaces: Mapping[torch.Tensor, Surface], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """Every tensor that the optimizers keep for a parameter, such as ``layer.2.up/weight.exp_avg``."""
    found: dict[Surface, torch.Tensor] = {}
    for optimizer in optimizers:
        for parameter, slots in optimizer.state.items():
            if parameter in surfaces and isinstance(slots, dict):
                found |= {
                    f"{surfaces[parameter]}.{slot}": value
                    for slot, value in slots.items()
                    if isinstance(value, torch.Tensor)
                }
    return found


class CensusRecipe:
    """All of it, each time: there is nothing to rotate over."""

    targets = ("",)
    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = True
    vouches = True

    def __init__(self, state: State, kind: str = "census", role: Role = Role.DENSE) -> None:
        self._state = state
        self.kind, self.role = kind, role

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _Census:  # noqa: ARG002  nothing is captured
        return _Census(self._state)

    def again(self, target: int, given: Given) -> _Census:  # noqa: ARG002  nothing is broadcast
        return _Census(self._state)


class _Census:
    """The state at the end of one step."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tensors: Mapping[str, Mapping[Surface, torch.Tensor]] = {}

    def describe(self) -> Any:
        self._tensors = {part: dict(sorted(tensors.items())) for part, tensors in self._state().items()}
        names = [name for tensors in self._tensors.values() for name in tensors]
        return {"tensors": len(names), "names": xxhash.xxh3_64_hexdigest("\n".join(names).encode())}

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        if any(other != descriptions[source] for other in descriptions):
            counts = [each["tensors"] for each in descriptions]
            raise ReplayError(f"peers do not hold the same tensors by name; they hold {counts}")

    def align(self, broadcast: Broadcast) -> None:
        """Every rank compares its own."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", ()

    def comparisons(self) -> list[Comparison]:
        return [
            Comparison(name, Mode.STATE, summary=f"state/{part}")
            for part, tensors in self._tensors.items()
            for name in tensors
        ]

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        seen.sign({name: each for tensors in self._tensors.values() for name, each in tensors.items()})

    def invocation(self) -> None:
        """State is no call."""

    def release(self) -> None:
        self._tensors = {}
