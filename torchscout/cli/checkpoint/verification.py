"""Verifies every bit of shards, and which generations a recovery can still load (paper, section 8)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchscout.checkpoint.gate import Changed, CheckpointGate, Generation, transition
from torchscout.checkpoint.resume.plan import Source, repair_sources, replaced, tensors_of
from torchscout.checkpoint.storage import shards
from torchscout.cli.checkpoint.contents import Contents, StoredShard
from torchscout.cli.checkpoint.listing import as_json, roles_of
from torchscout.errors import CheckpointError
from torchscout.utils.text import ranks_in_words, size_in_words

__all__ = [
    "Broken",
    "Damage",
    "Repairable",
    "Usable",
    "broken_lines",
    "examine",
    "repairable_lines",
    "usable",
]

_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Damage:
    """A shard that cannot be loaded."""

    copy: StoredShard
    problems: tuple[str, ...]
    report: shards.Report | None = None
    """What is wrong with which tensor; None if the header shows that it cannot be loaded."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return () if self.report is None else self.report.damaged


@dataclass(frozen=True, slots=True)
class Repairable:
    """A generation that ``session.resume()`` repairs and loads, although every copy of a shard is damaged."""

    generation: Generation
    ranks: tuple[int, ...]
    """The ranks whose shards are repaired."""
    sentences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**as_json(self.generation), "ranks": list(self.ranks), "repairs": list(self.sentences)}


@dataclass(frozen=True, slots=True)
class Broken:
    """A generation that has a role in the ledgers but cannot be loaded from these folders."""

    generation: Generation
    roles: tuple[str, ...]
    missing: tuple[int, ...]
    """The ranks without an intact shard."""
    damaged: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        files = [{"file": str(each.copy.file.path), "problems": list(each.problems)} for each in self.damaged]
        return {
            **as_json(self.generation),
            "roles": list(self.roles),
            "missing": list(self.missing),
            "damaged": files,
        }


class Usable(NamedTuple):
    """What can be loaded from these folders."""

    gate: CheckpointGate
    """Without the generations that cannot be loaded."""
    broken: list[Broken]
    repairable: list[Repairable]


def examine(copies: Sequence[StoredShard], *, bits: bool = True) -> list[Damage]:
    """The damaged ones of ``copies``; without ``bits``, as far as headers and lengths show."""
    suspects = [copy for copy in copies if copy.problem is not None]
    damaged = {copy.file.path: Damage(copy, (copy.problem or "",)) for copy in suspects}
    rest = [copy for copy in copies if copy.problem is None] if bits else []
    with _progress(sum(copy.file.size for copy in rest), len(rest)) as advance:
        for copy in rest:
            report = shards.verify(copy.file.path)
            if not report.whole:
                problems = tuple(each.removeprefix(f"{report.path}: ") for each in report.problems)
                damaged[report.path] = Damage(copy, problems, report)
            advance(copy.file.size)
    return [damaged[copy.file.path] for copy in copies if copy.file.path in damaged]


def usable(contents: Contents, gate: CheckpointGate, damaged: Sequence[Damage]) -> Usable:
    """What can be loaded, as ``session.resume()`` would find it if it found these folders."""
    paths = [each.copy.file.path for each in damaged]
    broken: list[Broken] = []
    repairable: list[Repairable] = []
    for generation in sorted(gate.held):
        own = [each for each in damaged if each.copy.file.generation == generation]
        if not (missing := contents.missing(generation, paths)):
            continue
        if (repaired := _repair(contents, generation, missing, own)) is not None:
            repairable.append(repaired)
        else:
            broken.append(Broken(generation, tuple(roles_of(generation, gate)), tuple(missing), tuple(own)))
    left = gate
    for each in broken:
        left, _ = transition(left, Changed("lost", each.generation))
    return Usable(left, broken, repairable)


def _repair(
    contents: Contents, generation: Generation, missing: Sequence[int], damaged: Sequence[Damage]
) -> Repairable | None:
    """How the shards of the ``missing`` ranks are repaired; None if they cannot all be."""
    reports = [_report(contents, generation, rank, damaged) for rank in range(contents.world_size)]
    known = [each for each in reports if each is not None]
    if len(known) < len(reports):
        return None
    needs, offers = ([tensors_of(each, damaged=is_damaged) for each in known] for is_damaged in (True, False))
    sources = repair_sources(needs, offers)
    if not sources.keys() >= {*missing}:
        return None
    sentences = tuple(replaced(known[rank], sources[rank], is_done=False) for rank in missing)
    return Repairable(generation, tuple(missing), sentences)


def _report(
    contents: Contents, generation: Generation, rank: int, damaged: Sequence[Damage]
) -> shards.Report | None:
    """The rank's whole shard, or else the damaged one that it would read last; see ``resume.fetch``."""
    reports = {each.copy.file.path: each.report for each in damaged}
    copies = [
        each for each in contents.copies if (each.file.generation, each.file.rank) == (generation, rank)
    ]
    copies.sort(key=lambda each: Source(rank, each.tier, each.file.holder).cost(rank))
    try:
        for each in copies:
            if not each.problem and each.file.path not in reports:
                return shards.Report(each.file.path, shards.inspect(each.file.path), (), ())
    except CheckpointError:  # it was deleted meanwhile
        return None
    readable = [report for each in copies if (report := reports.get(each.file.path)) and report.header]
    return readable[-1] if readable else None


def repairable_lines(repairable: Sequence[Repairable]) -> list[str]:
    lines = []
    for each in repairable:
        lines += [f"{each.generation} is damaged, and session.resume() would repair it:"]
        lines += [f"  {sentence}." for sentence in each.sentences]
    return [*lines, ""] if lines else []


def broken_lines(broken: Sequence[Broken], world_size: int, *, files: bool = True) -> list[str]:
    """Which generations cannot be loaded, and why; with ``files``, also what is wrong with each file."""
    lines = []
    for each in broken:
        whose = ranks_in_words(each.missing, world_size)
        name = f"{each.generation} ({', '.join(each.roles)})" if each.roles else str(each.generation)
        lines.append(f"{name} cannot be loaded: there is no intact shard of {whose} here.")
        damaged = each.damaged if files else ()
        lines += [f"  {file.copy.file.path}: {'; '.join(file.problems)}" for file in damaged]
    return [*lines, ""] if lines else []


@contextmanager
def _progress(size: int, count: int) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""
    if sys.stderr.isatty():
        columns = TextColumn("verifying"), BarColumn(), DownloadColumn(binary_units=True)
        with Progress(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
        ) as progress:
            task = progress.add_task("", total=size)
            yield lambda done: progress.advance(task, done)
    else:
        yield _Lines(size, count)


class _Lines:
    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._done = self._files = 0
        self._printed = time.monotonic()

    def __call__(self, size: int, /) -> None:
        self._done, self._files = self._done + size, self._files + 1
        if time.monotonic() - self._printed >= _PROGRESS_SECONDS and self._files < self._count:
            self._printed = time.monotonic()
            of = f"{size_in_words(self._done)} of {size_in_words(self._size)}"
            print(f"verified {self._files} of {self._count} shards, {of}", file=sys.stderr, flush=True)
