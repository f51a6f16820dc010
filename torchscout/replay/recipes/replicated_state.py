"""Compares all state that is replicated among peers: parameters and optimizer slots (paper, section 5.2).

Nothing is replayed or broadcast. Replicas start equal and apply equal updates, so any difference is evidence,
including a wrong weight in a layer that was not replayed yet. State that was never equal, or that only some
peers have, is not compared: see ``decision.ownership``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import xxhash

from torchscout.c3.signature import PendingSignatures
from torchscout.decision.ownership import BY_DESIGN, Ownership
from torchscout.decision.types import EvidenceRecord, Surface
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.recipe import Comparison, Mode, Observation, Recipe, Replay
from torchscout.state.table import Row, StateView

__all__ = ["ReplicatedStateRecipe"]

_SOME_RANKS = f"{BY_DESIGN}: only some ranks hold it"


class ReplicatedStateRecipe(Recipe):
    """All replicated state, in every check."""

    is_swept = True

    def __init__(
        self,
        held: StateView,
        kind: str = "replicated_state",
        role: LayerKind = LayerKind.DENSE,
    ) -> None:
        """``held`` is the state of this rank that its peers hold too."""
        self._held = held
        self.kind, self.role = kind, role
        self._names = _Names(held.table.ownership)
        self.signed: tuple[Sequence[Surface], PendingSignatures] | None = None
        """What the check in progress has signed, and its signatures."""

    def compared(self) -> list[torch.Tensor]:
        """Return the parameters that are replicated, as far as is known."""
        owned = self._held.table.ownership.owned
        return [row.tensor for name, row in self._held.parameters.items() if name not in owned]

    def state(self) -> Mapping[Surface, Row]:
        """Return all of it that this rank holds, compared or not."""
        return self._held.rows

    def new_replay(self, *_: object) -> _StateComparison:
        return _StateComparison(self, self._held, self._names)


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

    def __init__(self, recipe: ReplicatedStateRecipe, held: StateView, names: _Names) -> None:
        self._recipe = recipe
        self._held = held
        self._names = names
        self._compared: dict[str, list[Surface]] = {}

    def describe(self) -> Any:
        return self._names.describe([*self._held.rows])

    def prepare(self, descriptions: Sequence[Any], _: int, /) -> None:
        self._names.agree(descriptions)
        kinds = {"parameters": self._held.parameters, "optimizer": self._held.slots}
        self._compared = {
            kind: [name for name in rows if self._names.is_compared(name)] for kind, rows in kinds.items()
        }

    def comparisons(self) -> list[Comparison]:
        ownership = self._names.ownership
        return [
            Comparison(
                name,
                Mode.STATE,
                summary=f"state/{kind}",
                is_new=ownership.is_new(name),
                is_local=ownership.is_local(name),
            )
            for kind, names in self._compared.items()
            for name in names
        ]

    def observe(self, seen: Observation) -> None:
        names = [*chain(*self._compared.values())]
        signed = self._held.sign(names, finite=True)

        def record(found: Sequence[int]) -> None:
            seen.signatures.update(zip(names, found, strict=True))
            self._recipe.signed = names, signed

        seen.when_signed(signed, record)

    def learn(self, records: Sequence[EvidenceRecord]) -> None:
        owned = {
            each.surface: each.reason for each in records if each.reason and each.reason.startswith(BY_DESIGN)
        }
        self._names.ownership.learn([*chain(*self._compared.values())], owned)

    def release(self) -> None:
        self._compared = {}
        self._recipe.signed = None
