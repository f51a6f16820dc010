"""Compares all state that peers hold copies of: parameters and optimizer slots (paper, section 5.2).

Nothing is replayed or broadcast: replicas start equal and apply equal updates, so that equality itself is the
evidence. A wrong weight that no replayed layer has met yet is found here. What peers never held equal, or
only some of them hold, is not compared: see ``decision.ownership``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchscout.decision.ownership import BY_DESIGN, Ownership
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.recipe import Comparison, Given, Mode, Observation

__all__ = ["ReplicatedStateRecipe", "State", "slots_of"]

State = Callable[[], Mapping[str, Mapping[Surface, torch.Tensor]]]
"""The tensors as they are now, by what they are: ``parameters``, ``optimizer``."""
_SOME_RANKS = f"{BY_DESIGN}: only some ranks hold it"


def slots_of(
    surfaces: Mapping[torch.Tensor, Surface], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """Every tensor that the optimizers keep for a parameter, such as ``layer.2.up/weight.exp_avg``."""
    found: dict[Surface, torch.Tensor] = {}
    # It keeps its slots in another one.
    inner = [each.optim for each in optimizers if isinstance(each, ZeroRedundancyOptimizer)]
    for optimizer in (*optimizers, *inner):
        for parameter, slots in optimizer.state.items():
            if parameter in surfaces and isinstance(slots, dict):
                found |= {
                    f"{surfaces[parameter]}.{slot}": value
                    for slot, value in slots.items()
                    if isinstance(value, torch.Tensor)
                }
    return found


class ReplicatedStateRecipe:
    """All of it, each time: there is nothing to rotate over."""

    targets = ("",)
    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = True
    is_required = True

    def __init__(
        self,
        state: State,
        kind: str = "census",
        role: LayerKind = LayerKind.DENSE,
        ownership: Ownership | None = None,
    ) -> None:
        self._state = state
        self.kind, self.role = kind, role
        self.ownership = Ownership() if ownership is None else ownership
        self._names = _Names(self.ownership)

    def compared(self) -> list[torch.Tensor]:
        """The parameters that peers hold copies of, as far as is known."""
        owned = self.ownership.owned
        return [each for name, each in self._state()["parameters"].items() if name not in owned]

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _Census:  # noqa: ARG002  nothing is captured
        return _Census(self._state, self._names)

    def again(self, target: int, given: Given) -> _Census:  # noqa: ARG002  nothing is broadcast
        return _Census(self._state, self._names)


class _Names:
    """What peers hold, by name. All names are exchanged only when those of a rank have changed."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self._own = ""
        self._agreed: list[str] = []
        """The digest of each peer's names, as of the last exchange."""
        self._common: frozenset[Surface] = frozenset()

    def describe(self, names: Sequence[Surface]) -> dict[str, Any]:
        digest = xxhash.xxh3_64_hexdigest("\n".join(names).encode())
        is_news, self._own = digest != self._own or not self._agreed, digest
        return {"digest": digest, "names": list(names) if is_news else None}

    def agree(self, descriptions: Sequence[Any]) -> None:
        """Find out what all peers hold; a ``ReplayError`` if they cannot tell, or no longer hold it."""
        digests = [each["digest"] for each in descriptions]
        if digests == self._agreed:
            return
        self._agreed = []  # so that all peers send their names in the next check, if this one fails
        names = [each["names"] for each in descriptions]
        if any(each is None for each in names):
            raise ReplayError("the state of some ranks has changed its names; all names are compared next")
        held = [frozenset(each) for each in names]
        common, every = frozenset.intersection(*held), frozenset.union(*held)
        if lost := sorted((every - common) & self.ownership.replicated):
            without = [place for place, each in enumerate(held) if lost[0] not in each]
            raise ReplayError(f"{lost[0]} was held by all peers, and is no longer held by peers {without}")
        self._agreed, self._common = digests, common
        self.ownership.owned |= dict.fromkeys(every - common, _SOME_RANKS)

    def is_compared(self, name: Surface) -> bool:
        return name in self._common and name not in self.ownership.owned


class _Census:
    """The state at the end of one step."""

    def __init__(self, state: State, names: _Names) -> None:
        self._state, self._names = state, names
        self._tensors: Mapping[str, Mapping[Surface, torch.Tensor]] = {}

    def describe(self) -> Any:
        self._tensors = {part: dict(sorted(tensors.items())) for part, tensors in self._state().items()}
        return self._names.describe([name for tensors in self._tensors.values() for name in tensors])

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:  # noqa: ARG002  nothing is sent
        self._names.agree(descriptions)
        self._tensors = {
            part: {name: each for name, each in tensors.items() if self._names.is_compared(name)}
            for part, tensors in self._tensors.items()
        }

    def align(self, broadcast: Broadcast) -> None:
        """Every rank compares its own."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", ()

    def comparisons(self) -> list[Comparison]:
        ownership = self._names.ownership
        return [
            Comparison(
                name,
                Mode.STATE,
                summary=f"state/{part}",
                is_new=ownership.is_new(name),
                is_local=ownership.is_local(name),
            )
            for part, tensors in self._tensors.items()
            for name in tensors
        ]

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        seen.sign({name: each for tensors in self._tensors.values() for name, each in tensors.items()})

    def learn(self, records: Sequence[EvidenceRecord]) -> None:
        owned = {
            each.surface: each.reason for each in records if each.reason and each.reason.startswith(BY_DESIGN)
        }
        self._names.ownership.learn([name for each in self._tensors.values() for name in each], owned)

    def invocation(self) -> None:
        """State is no call."""

    def release(self) -> None:
        self._tensors = {}
