"""Resumes from a checkpoint that other ranks, or another layout, have saved (paper, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchscout.checkpoint.reshard.load import Layout, layouts_of, reshard
from torchscout.checkpoint.resume.fetch import Fetched
from torchscout.checkpoint.resume.plan import RestorePlan
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.state.training_state import StateParts
from torchscout.checkpoint.storage.inventory import FoundShard, Member
from torchscout.checkpoint.trust.generation import Generation
from torchscout.communicators import Communicators
from torchscout.errors import CheckpointError, UnavailableError
from torchscout.log import log
from torchscout.session.checkpoints.resumption import (
    Load,
    PreviousRun,
    Resumption,
    previous_of_any_size,
    restore_together,
)
from torchscout.utils.text import listed

__all__ = ["Resharding"]


class Resharding:
    """Loads generations of any layout; those of this job's own layout with ``same``, bit by bit."""

    def __init__(
        self,
        member: Member,
        folders: tuple[Path, Path],
        communicators: Communicators,
        parts: Callable[[], StateParts],
        same: Load,
    ) -> None:
        self._member, self._folders, self._communicators = member, folders, communicators
        self._links = Links(communicators.exchange, communicators.group)
        self._parts, self._same = parts, same
        self._source: Layout | None = None
        self._restored: tuple[str, ...] = ()
        self._not_restored: tuple[str, ...] = ()

    def previous_run(self) -> PreviousRun | None:
        """What a run of any number of ranks has left; None if nothing."""
        found = previous_of_any_size(self._folders, self._member, self._links.exchange)
        return None if found is None or found.is_nothing else found

    def load(self, wanted: Sequence[Generation]) -> Fetched[Any]:
        """Load the first of these generations that all ranks can get; raises ``UnavailableError``."""
        passed: list[tuple[Generation, str]] = []
        for generation in wanted:
            fetched, why = self._load(generation)
            if fetched is not None:
                return replace(fetched, plan=replace(fetched.plan, passed=tuple(passed)))
            passed.append((generation, why))
        raise UnavailableError(RestorePlan(None, (), tuple(passed)).reason)

    def described(self, resumed: Resumption) -> Resumption:
        """The resumption with what was taken over from another layout, and what was not."""
        if self._source is None:
            return resumed
        lost = f" Not restored: {listed(self._not_restored, most=20)}." if self._not_restored else ""
        return replace(
            resumed,
            source=f"the shards of {self._source.world_size} ranks",
            reason=f"{resumed.reason} It was saved by {self._source} and resharded.{lost}",
            resharded_from=str(self._source),
            restored=self._restored,
            not_restored=self._not_restored,
        )

    def _load(self, generation: Generation) -> tuple[Fetched[Any] | None, str]:
        """Load one generation, or say why it cannot be loaded, the same on every rank."""
        self._source = None
        layouts, stock = layouts_of(generation, self._member, self._folders, self._links)
        complete = [each for each in layouts if not each.missing]
        own = (self._member.mesh, self._member.world_size)
        # A generation has one layout: every run begins a lineage of its own.
        complete.sort(key=lambda each: (each.mesh, each.world_size) != own)
        if not complete:
            return None, _incomplete(layouts)
        layout = complete[0]
        if (layout.mesh, layout.world_size) == own:
            try:
                return self._same([generation]), ""
            except UnavailableError as error:
                return None, str(error)
            except CheckpointError as error:  # the same on every rank
                if self._member.rank == 0:
                    log.info("%s is resharded, because it does not fit as it is: %s", generation, error)
        return self._reshard(generation, layout, stock)

    def _reshard(
        self, generation: Generation, layout: Layout, stock: Sequence[FoundShard]
    ) -> tuple[Fetched[Any] | None, str]:
        taken = reshard(layout, stock, self._parts(), self._member, self._links)
        if taken.state is None:
            return None, f"it cannot be resharded from {layout}: {'; '.join(taken.problems)}"
        restore_together(generation, taken.state.parts, taken.state.tree, self._communicators)
        self._source = layout
        self._restored, self._not_restored = taken.state.restored, taken.state.not_restored
        plan = RestorePlan(generation, (), (), layout.in_files)
        demoted = tuple(each for found in self._links.exchange(list(taken.notes)) for each in found)
        return Fetched(plan, None, None, tuple(dict.fromkeys(demoted))), ""


def _incomplete(layouts: Sequence[Layout]) -> str:
    if not layouts:
        return "no rank has a shard of it"
    lacking = [f"of {each}, no shard of {_ranks(each.missing)} is there" for each in layouts]
    return "; ".join(lacking)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(map(str, ranks), most=8)}"
