"""Verifies every bit of shards, and which generations a recovery can still load (paper, section 8)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.storage import shards
from torchscout.cli.checkpoint.contents import Contents, StoredShard
from torchscout.cli.checkpoint.listing import roles_of
from torchscout.cli.checkpoint.wording import ranks_in_words, size_in_words

__all__ = ["Broken", "Damage", "broken_lines", "examine", "usable"]

_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Damage:
    """A shard that cannot be loaded."""

    copy: StoredShard
    tensors: tuple[str, ...]
    problems: tuple[str, ...]


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
            "step": self.generation.step,
            "lineage": self.generation.lineage,
            "roles": list(self.roles),
            "missing": list(self.missing),
            "damaged": files,
        }


def examine(copies: Sequence[StoredShard], *, bits: bool = True) -> list[Damage]:
    """The damaged ones of ``copies``; without ``bits``, as far as headers and lengths show."""
    suspects = [copy for copy in copies if copy.problem is not None]
    damaged = {copy.file.path: Damage(copy, (), (copy.problem or "",)) for copy in suspects}
    rest = [copy for copy in copies if copy.problem is None] if bits else []
    with _progress(sum(copy.file.size for copy in rest), len(rest)) as advance:
        for copy in rest:
            report = shards.verify(copy.file.path)
            if not report.whole:
                problems = tuple(each.removeprefix(f"{report.path}: ") for each in report.problems)
                damaged[report.path] = Damage(copy, report.damaged, problems)
            advance(copy.file.size)
    return [damaged[copy.file.path] for copy in copies if copy.file.path in damaged]


def usable(
    contents: Contents, gate: CheckpointGate, damaged: Sequence[Damage]
) -> tuple[CheckpointGate, list[Broken]]:
    """The gate without the generations that cannot be loaded, and those generations."""
    paths = [each.copy.file.path for each in damaged]
    broken = [
        Broken(
            generation,
            tuple(roles_of(generation, gate)),
            tuple(missing),
            tuple(each for each in damaged if each.copy.file.generation == generation),
        )
        for generation in sorted(gate.held)
        if (missing := contents.missing(generation, paths))
    ]
    gone = {each.generation for each in broken}
    left = replace(
        gate,
        captured=tuple(each for each in gate.captured if each not in gone),
        trusted=tuple(each for each in gate.trusted if each not in gone),
        durable=tuple(each for each in gate.durable if each not in gone),
        candidate=None if gate.candidate in gone else gate.candidate,
        interim=None if gate.interim in gone else gate.interim,
        writing=None if gate.writing in gone else gate.writing,
    )
    if gate.captured and not left.captured and left.newest_candidate is not None:
        left = replace(left, captured=(left.newest_candidate,))
    return left, broken


def broken_lines(broken: Sequence[Broken], world_size: int) -> list[str]:
    lines = []
    for each in broken:
        whose = ranks_in_words(each.missing, world_size)
        name = f"{each.generation} ({', '.join(each.roles)})" if each.roles else str(each.generation)
        lines.append(f"{name} cannot be loaded: there is no intact shard of {whose} here.")
        lines += [f"  {file.copy.file.path}: {'; '.join(file.problems)}" for file in each.damaged]
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
