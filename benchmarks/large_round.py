"""How a round of the observers grows with the job: a part of ``observer.py``.

Nobody moves in a large job on paper, and its observers' reports are read and diagnosed as the hub does it.

It has replicas of eight tensor-parallel ranks. In every step a rank takes part in three all-reduces of its
tensor group, one of its replica group, and one of the whole job.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankReport, Window
from torchscout.mesh import Mesh
from torchscout.observer.record.layout import RECENT
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.post_writer import post_of

TENSOR = 8
STEP = 40
SIZES = (1_024, 16_384, 131_072)
FLAT = 1.5
"""What a rank may cost in the largest job, relative to the smallest."""


def scale() -> dict[str, dict[str, Any]]:
    """How a round grows with the job: its reports read, and then diagnosed, for each of two faults.

    ``per_rank`` is the time for a rank relative to that in the smallest job, in this run.
    """
    figures: dict[str, dict[str, Any]] = {}
    for fault in ("stalled", "gone"):
        smallest: dict[str, float] = {}
        for size in SIZES:
            seconds = seconds_of_round(LargeRound(size, gone=fault == "gone"))
            each = {name: value / size for name, value in seconds.items()}
            smallest = smallest or each
            figures[f"{fault}, {size} ranks"] = {
                "read_s": round(seconds["read"], 3),
                "diagnose_s": round(seconds["diagnose"], 3),
                "read_per_rank": round(each["read"] / smallest["read"], 2),
                "diagnose_per_rank": round(each["diagnose"] / smallest["diagnose"], 2),
            }
        largest = figures[f"{fault}, {SIZES[-1]} ranks"]
        reached = largest["diagnose_per_rank"] <= FLAT
        largest |= {"goal": {"diagnose_per_rank": FLAT}, "reached": reached}
    return figures


def seconds_of_round(large: LargeRound) -> dict[str, float]:
    """To read all reports, and to name the culprit: the fastest of some times.

    Of the processor, not of the clock: minutes of somebody else's work would pass for growth.
    """
    posts, read_ns, times = [], 0, []
    for message in large.messages():
        begin = time.process_time_ns()
        posts.append(Post(message, len(large.mesh)))
        read_ns += time.process_time_ns() - begin
    for _ in range(3):
        begin = time.process_time_ns()
        groups: dict[bytes, CommGroup] = {}
        reports = {rank: post.report(groups) for rank, post in enumerate(posts)}
        (incident,) = diagnose(Round(reports, large.mesh)).incidents
        times.append(time.process_time_ns() - begin)
        assert incident.ranks == (large.culprit,), incident.sentence
    return {"read": read_ns / 1e9, "diagnose": min(times) / 1e9}


class LargeRound:
    """One rank never comes to the all-reduce that its tensor group, or else the whole job, waits in."""

    def __init__(self, size: int, *, gone: bool) -> None:
        """``gone``: its process has ended, and it is its tensor group that waits for it."""
        hosts = [f"node-{rank // TENSOR}" for rank in range(size)]
        self.mesh = Mesh.grid(replica=size // TENSOR, tensor=TENSOR, hosts=hosts)
        self.culprit = size // 2 + size // 3
        self._gone = gone
        self._world = CommGroup("world", tuple(range(size)), "world")
        self._replica = [
            CommGroup(f"replica.{t}", tuple(range(t, size, TENSOR)), "dp") for t in range(TENSOR)
        ]
        self._issued = functools.cache(_issued)

    def messages(self) -> Iterator[bytes]:
        """Each rank's report, as it arrives at the hub."""
        return map(self.message, range(len(self.mesh)))

    def message(self, rank: int) -> bytes:
        return post_of(self._report(rank), 1)

    def _lines(self, rank: int) -> tuple[CommGroup, CommGroup, CommGroup]:
        first = rank - rank % TENSOR
        tensor = CommGroup(f"tensor.{first}", tuple(range(first, first + TENSOR)), "tp")
        return tensor, self._replica[rank % TENSOR], self._world

    def _report(self, rank: int) -> RankReport:
        is_late, beside = rank == self.culprit, rank // TENSOR == self.culprit // TENSOR
        tensor, replica, world = self._lines(rank)
        program = [tensor, tensor, tensor, replica, world] * (RECENT // 5 + 2)
        # Where the program ends: the gone rank is missed two all-reduces before the end of a step.
        back = (2 + is_late if beside else 1) if self._gone else int(is_late)
        program = program[: len(program) - back]
        issued: dict[str, int] = {}
        recent = []
        for line in program:
            issued[line.key] = issued.get(line.key, 0) + 1
            recent.append(self._issued(line.key, issued[line.key]))
        progress = Progress(
            rank=rank,
            step=STEP,
            operation=5 - back,
            phase=Phase.BACKWARD,
            issued=issued,
            recent=Window(recent[-RECENT:]),
            at_communication=not is_late,
            silent_seconds=6.0,
        )
        is_gone = is_late and self._gone
        return RankReport(
            rank,
            Process.GONE if is_gone else Process.RUNNING,
            progress,
            groups=(tensor, replica, world),
            waiting=None if is_gone else not is_late,
            gone_seconds=7.0 if is_gone else None,
        )


def _issued(line: str, number: int) -> IssuedOp:
    digest = 0x9E37_79B9_7F4A_7C15 * number >> 8
    return IssuedOp(line, number, 0xFEED_5EED_0123_4567, digest, "all_reduce bfloat16[8192,4096] sum")
