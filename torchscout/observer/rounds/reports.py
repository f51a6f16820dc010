"""The reports of one round, by rank. Most are never read as a whole: see ``columns``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from torchscout.decision.progress import Process, Progress, RankStatus
from torchscout.observer.rounds.post import FLAGS, Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.rank_report import RankReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Reports", "Stack"]


class Stack(NamedTuple):
    """What an observer says of its trainer's stacks."""

    text: str
    waiting: bool | None
    """Whether they show it waiting for a communication."""


class Reports(Mapping[int, RankReport]):
    """Posts, with what was learned of their ranks since. A report is read when it is asked for."""

    def __init__(
        self,
        posts: Mapping[int, Post],
        stacks: Mapping[int, Stack] | None = None,
        ages: Mapping[int, float] | None = None,
    ) -> None:
        self.posts, self.stacks, self.ages = posts, stacks or {}, ages or {}
        """``ages``: how long ago the observers that have left sent their last posts, in seconds."""
        self._read: dict[int, RankReport] = {}
        self._statuses: dict[int, RankStatus] = {}

    @classmethod
    def of(cls, reports: Mapping[int, RankReport]) -> Reports:
        """Return the reports as if they had been sent."""
        if isinstance(reports, Reports):
            return reports
        size = 1 + max(reports, default=0)
        size = max(
            [size, *(rank + 1 for each in reports.values() for line in each.lines for rank in line.members)]
        )
        statuses = {rank: each.status for rank, each in reports.items()}
        return cls(
            {rank: Post(post_of(each), size) for rank, each in reports.items()},
            {rank: Stack(each.stack, each.waiting) for rank, each in statuses.items() if each.stack},
        )

    @cached_property
    def in_order(self) -> list[Post]:
        """The posts by ascending rank."""
        return [self.posts[rank] for rank in sorted(self.posts)]

    @cached_property
    def headers(self) -> npt.NDArray[np.void]:
        """The headers of ``in_order``."""
        from torchscout.observer.rounds.columns import headers_of  # with numpy, which only rounds need

        return headers_of(self.in_order)

    @cached_property
    def flags(self) -> int:
        """What is true of any rank; see ``post.FLAGS``."""
        found = 0
        for flags in set(self.headers["flags"].tolist()):
            found |= flags
        return found

    @cached_property
    def gone(self) -> dict[int, float]:
        """Rank -> how many seconds ago its trainer was seen to have ended early."""
        # Not a number, which compares as not greater than anything, if it is not gone.
        headers = self.headers[self.headers["gone_seconds"] >= -inf]
        found = zip(headers["rank"].tolist(), headers["gone_seconds"].tolist(), strict=True)
        return {rank: since + self.ages.get(rank, 0.0) for rank, since in found}

    @property
    def last_step(self) -> int:
        return max((post.header.step for post in self.posts.values()), default=0)

    @property
    def silent_seconds(self) -> float:
        """The longest silence of a rank."""
        return max((post.header.silent_seconds for post in self.posts.values()), default=0.0)

    def process(self, rank: int) -> Process:
        return self.posts[rank].process

    @property
    def ended(self) -> list[int]:
        """Ranks whose trainers are gone, ascending."""
        return sorted(rank for rank, post in self.posts.items() if post.process is Process.GONE)

    def says(self, rank: int, flag: str) -> bool:
        """Return one of ``post.FLAGS``."""
        return bool(self.posts[rank].header.flags & FLAGS[flag])

    def stalled(self, rank: int) -> Progress | None:
        stalled = self.posts[rank].rest.get("stalled")
        return None if stalled is None else Progress.from_json(stalled)

    def __getitem__(self, rank: int) -> RankReport:
        if rank not in self._read:
            report = replace(self.posts[rank].report(), status=self.status(rank))
            if report.gone_seconds is not None and rank in self.ages:
                report = replace(report, gone_seconds=report.gone_seconds + self.ages[rank])
            self._read[rank] = report
        return self._read[rank]

    def status(self, rank: int) -> RankStatus:
        """Return the status alone, which is read much faster."""
        if rank not in self._statuses:
            status = self.posts[rank].status()
            if rank in self.stacks:
                stack, waiting = self.stacks[rank]
                status = replace(status, stack=stack, waiting=waiting)
            self._statuses[rank] = status
        return self._statuses[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self.posts

    def __iter__(self) -> Iterator[int]:
        return iter(self.posts)

    def __len__(self) -> int:
        return len(self.posts)
