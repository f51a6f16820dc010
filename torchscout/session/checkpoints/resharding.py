"""Resumes from a checkpoint that other ranks, or another layout, have saved (paper, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.reshard.load import Layout, layouts_of, reshard
from torchscout.checkpoint.resume.fetch import Fetched
from torchscout.checkpoint.resume.plan import RestorePlan
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.storage.inventory import FoundShard, Member
from torchscout.communicators import Communicators
from torchscout.errors import CheckpointError, UnavailableError
from torchscout.log import log
from torchscout.session.checkpoints.resumption import (
    DifferentError,
    Load,
    PreviousRun,
    RankRemains,
    Resumption,
    restore_together,
)
from torchscout.state.collect import StateParts
from torchscout.utils.text import listed, spans

__all__ = ["Resharding", "previous_of_any_size"]


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
            except DifferentError:
                raise
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


def previous_of_any_size(
    folders: Sequence[Path], member: Member, exchange: Callable[[Any], list[Any]]
) -> PreviousRun | None:
    """The last run of this job with any number of ranks; None if there is no ledger of it. Call it on every
    rank: all ledgers that any rank finds count."""
    rows = []
    for rank in _ledgers_to_read(folders, member.rank, exchange):
        if (size := _newest_size(folders, rank, member.job)) is not None:
            found = RankRemains.found(folders, replace(member, rank=rank, world_size=size))
            rows.append([rank, size, found.to_json()])
    remains: dict[tuple[int, int], list[RankRemains]] = {}
    for rank, size, document in (row for each in exchange(rows) for row in each):
        remains.setdefault((rank, size), []).append(RankRemains.from_json(document))
    lineages = {
        (each.gate.lineage, size)
        for (_, size), found in remains.items()
        for each in found
        if each.gate is not None
    }
    if not lineages:
        return None
    _, last = max(lineages)
    return PreviousRun.of([_merged(remains.get((rank, last), [])) for rank in range(last)])


def _ledgers_to_read(folders: Sequence[Path], me: int, exchange: Callable[[Any], list[Any]]) -> list[int]:
    """The ranks whose ledgers this rank reads. Ranks that find the same folder read a part of it each:
    otherwise every rank of a job that shares a disk would read, and send to all others, every ledger."""
    listings = [_list_ledgers(folder, me) for folder in folders]
    gathered = exchange(listings)
    chosen: set[int] = set()
    for each in listings:
        finders = [rank for rank, found in enumerate(gathered) if each in found]
        ranks = [rank for first, last in each[-1] for rank in range(first, last + 1)]
        chosen.update(ranks[finders.index(me) :: len(finders)])
    return sorted(chosen)


def _list_ledgers(folder: Path, me: int) -> list[Any]:
    """The ranks with a ledger in a folder, and what identifies the folder. Two ranks that list the same share
    it. The names alone do not identify it: a job whose ranks change machines leaves the same ones on each.
    So the first and the last ledger are identified by inode and modification time."""
    ranks = ledger.ranks_in(folder) if folder.is_dir() else []
    try:
        files = [ledger.path_of(folder, rank).stat() for rank in ranks[:1] + ranks[-1:]]
        marks = [[each.st_ino, each.st_mtime_ns] for each in files]
    except OSError:  # only the previous one is there: share the folder with no other rank
        marks = [[me, -1]]
    return [marks, spans(ranks)]


def _newest_size(folders: Sequence[Path], rank: int, job: str) -> int | None:
    """The number of ranks of the job, as the newest of this rank's ledgers has it; None without a ledger."""
    sizes: list[tuple[int, int, int]] = []
    for folder in folders:
        try:
            found = ledger.inspect(folder, rank)
        except CheckpointError:
            continue
        if found is not None and found.job == job:
            sizes.append((found.gate.lineage, found.gate.step, found.world_size))
    return max(sizes)[-1] if sizes else None


def _merged(found: Sequence[RankRemains]) -> RankRemains:
    """What several ranks have found of one rank of the last run."""
    newest = ledger.newest([each.gate for each in found if each.gate is not None])
    alike = [each for each in found if newest and each.gate and each.gate.pending == newest.pending]
    return RankRemains(
        newest,
        tuple(problem for each in found for problem in each.problems),
        max((each.shards for each in found), default=0),
        tuple({span for each in alike for span in each.pending}),
        max((each.lineage for each in found), default=0),
        ledger.newest([each.before for each in found if each.before is not None]),
    )


def _incomplete(layouts: Sequence[Layout]) -> str:
    if not layouts:
        return "no rank has a shard of it"
    lacking = [f"of {each}, no shard of {_ranks(each.missing)} is there" for each in layouts]
    return "; ".join(lacking)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(map(str, ranks), most=8)}"
