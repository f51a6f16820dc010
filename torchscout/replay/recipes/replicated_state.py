"""Compares all state that is replicated among peers: parameters and optimizer slots (paper, section 5.2).

Nothing is replayed or broadcast. Replicas start equal and apply equal updates, so any difference is evidence,
including a wrong weight in a layer that was not replayed yet. State that was never equal, or that only some
peers have, is not compared: see ``decision.ownership``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from torchscout.decision.ownership import BY_DESIGN, Ownership
from torchscout.decision.types import EvidenceRecord, Surface
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.recipe import Comparison, Mode, Observation, Recipe, Replay
from torchscout.utils._torch import inner_of

__all__ = ["ReplicatedStateRecipe", "State", "slots_of"]

State = Callable[[], Mapping[str, Mapping[Surface, torch.Tensor]]]
"""Returns the current tensors, as ``parameters`` and ``optimizer``."""
_SOME_RANKS = f"{BY_DESIGN}: only some ranks hold it"


def slots_of(
    surfaces: Mapping[torch.Tensor, Surface], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """Return every tensor of optimizer state, named as ``layer.2.up/weight.exp_avg``."""
    found: dict[Surface, torch.Tensor] = {}
    # ZeroRedundancyOptimizer keeps its slots in an inner optimizer.
    inner = [each for each in map(inner_of, optimizers) if each is not None]
    for optimizer in (*optimizers, *inner):
        for parameter, slots in optimizer.state.items():
            if parameter in surfaces and isinstance(slots, dict):
                found |= {
                    f"{surfaces[parameter]}.{slot}": value
                    for slot, value in slots.items()
                    if isinstance(value, torch.Tensor)
                }
    return found


class ReplicatedStateRecipe(Recipe):
    """All replicated state, in every check."""

    is_swept = True

    def __init__(
        self,
        state: State,
        kind: str = "replicated_state",
        role: LayerKind = LayerKind.DENSE,
        ownership: Ownership | None = None,
    ) -> None:
        self._state = state
        self.kind, self.role = kind, role
        self.ownership = Ownership() if ownership is None else ownership
        self._names = _Names(self.ownership)

    def compared(self) -> list[torch.Tensor]:
        """Return the parameters that are replicated, as far as is known."""
        owned = self.ownership.owned
        return [each for name, each in self._state()["parameters"].items() if name not in owned]

    def state(self) -> dict[Surface, torch.Tensor]:
        """Return all of it that this rank holds, compared or not."""
        return {name: each for tensors in self._state().values() for name, each in tensors.items()}

    def new_replay(self, *_: object) -> _StateComparison:
        return _StateComparison(self._state, self._names)


class _Names:
    """The names of all state on all peers. They are exchanged only if those of a rank have changed."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self._own = ""
        self._agreed: list[str] = []
        """The digest of each peer's names at the last exchange."""
        self._common: frozenset[Surface] = frozenset()

    def describe(self, names: Sequence[Surface]) -> dict[str, Any]:
        digest = xxhash.xxh3_64_hexdigest("\n".join(names).encode())
        has_changed, self._own = digest != self._own or not self._agreed, digest
        return {"digest": digest, "names": list(names) if has_changed else None}

    def agree(self, descriptions: Sequence[Any]) -> None:
        """Determine which state all peers have. Raise ``ReplayError`` if names are missing, or state is."""
        digests = [each["digest"] for each in descriptions]
        if digests == self._agreed:
            return
        self._agreed = []  # if this check fails, all peers send their names in the next one
        names = [each["names"] for each in descriptions]
        if any(each is None for each in names):
            raise ReplayError(
                "the names of some ranks' state have changed; the next check exchanges all names"
            )
        by_peer = [frozenset(each) for each in names]
        common, every = frozenset.intersection(*by_peer), frozenset.union(*by_peer)
        if lost := sorted((every - common) & self.ownership.replicated):
            without = [place for place, each in enumerate(by_peer) if lost[0] not in each]
            raise ReplayError(f"all peers had {lost[0]}, and peers {without} no longer have it")
        self._agreed, self._common = digests, common
        self.ownership.owned |= dict.fromkeys(every - common, _SOME_RANKS)

    def is_compared(self, name: Surface) -> bool:
        return name in self._common and name not in self.ownership.owned


class _StateComparison(Replay):
    """The state at the end of one step."""

    def __init__(self, state: State, names: _Names) -> None:
        self._state, self._names = state, names
        self._tensors: Mapping[str, Mapping[Surface, torch.Tensor]] = {}

    def describe(self) -> Any:
        self._tensors = {part: dict(sorted(tensors.items())) for part, tensors in self._state().items()}
        return self._names.describe([name for tensors in self._tensors.values() for name in tensors])

    def prepare(self, descriptions: Sequence[Any], _: int, /) -> None:
        self._names.agree(descriptions)
        self._tensors = {
            part: {name: each for name, each in tensors.items() if self._names.is_compared(name)}
            for part, tensors in self._tensors.items()
        }

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

    def observe(self, seen: Observation) -> None:
        seen.sign({name: each for tensors in self._tensors.values() for name, each in tensors.items()})

    def learn(self, records: Sequence[EvidenceRecord]) -> None:
        owned = {
            each.surface: each.reason for each in records if each.reason and each.reason.startswith(BY_DESIGN)
        }
        self._names.ownership.learn([name for each in self._tensors.values() for name in each], owned)

    def release(self) -> None:
        self._tensors = {}
