"""Hang localization by a thread of the trainer, in place of the out-of-band observer (paper, section 7).

The progress record, the threshold and the diagnosis are the same; only the observer process is missing.
Ranks exchange records either by an all-gather on their own process group, as the paper's observers do, or by
posts that are read after a deadline, so that ranks that have not posted are absent.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchscout.adapters.registry import adapter_for
from torchscout.campaign.cells.cell import JobLayout
from torchscout.campaign.cells.observed import (
    QUICK,
    TRAIN,
    ObservedRankResult,
    firings_of,
    redirect_output,
    steps,
)
from torchscout.campaign.cells.training import training_of
from torchscout.collectives.interceptor import listen
from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import CommGroup, Process, RankReport
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.silence import SilenceDetector
from torchscout.run.writer import RunWriter
from torchscout.utils.identity import host_name

__all__ = ["train_gathering", "train_posting"]

_DEADLINE_SECONDS = 1.0

_Exchange = Callable[[bytes], Sequence[bytes]]
"""Takes this rank's post and returns the posts of all ranks that answered; none if that failed."""


def train_gathering(
    rank: int, requests: Iterator[Any], layout: JobLayout, faults: FaultPlan, run_dir: Path
) -> Iterator[ObservedRankResult]:
    """Like ``observed.train``, with a thread that exchanges records by an all-gather."""
    timeout = datetime.timedelta(seconds=QUICK.round_deadline_seconds + 2.0)
    group = dist.new_group(timeout=timeout, group_desc="watchdog")

    def exchange(post: bytes) -> Sequence[bytes]:
        posts: list[Any] = [None] * layout.ranks
        try:
            dist.all_gather_object(posts, post, group=group)
        except RuntimeError:  # a rank did not take part
            return []
        return posts

    yield from _train(rank, requests, layout, faults, run_dir, exchange)


def train_posting(
    rank: int, requests: Iterator[Any], layout: JobLayout, faults: FaultPlan, run_dir: Path
) -> Iterator[ObservedRankResult]:
    """Like ``observed.train``, with a thread that posts its record and reads the posts of other ranks."""
    board = run_dir / "posts"
    board.mkdir(exist_ok=True)

    def exchange(post: bytes) -> Sequence[bytes]:
        unfinished = board / f".{rank}"
        unfinished.write_bytes(post)
        unfinished.rename(board / f"{rank}.post")
        time.sleep(_DEADLINE_SECONDS)
        return [path.read_bytes() for path in sorted(board.glob("*.post"))]

    yield from _train(rank, requests, layout, faults, run_dir, exchange)


def _train(
    rank: int,
    requests: Iterator[Any],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    exchange: _Exchange,
) -> Iterator[ObservedRankResult]:
    redirect_output(run_dir)
    training = training_of(layout)
    adapter = adapter_for(training.model, training.optimizer, layout.mesh() if layout.tensor > 1 else None)
    mesh = adapter.mesh([host_name()] * layout.ranks)
    writer = ProgressWriter.create(run_dir / f"record-{rank}", rank)
    publisher = Publisher(writer)
    publisher.watch_layers(adapter.layers())
    publisher.watch_optimizer(training.optimizer)
    log = firings_of(run_dir) / f"rank-{rank}.jsonl"
    watchdog = _Watchdog(writer.path, mesh, run_dir, exchange)
    with listen(publisher), Injector(faults, rank, training.net, training.optimizer, log=log) as injector:
        watchdog.start()
        for request in requests:
            if request == TRAIN:
                steps(training, publisher.watch_input(injector.input(training.batches())))
            yield ObservedRankResult([])
        watchdog.closing.set()
        watchdog.join(timeout=_DEADLINE_SECONDS)
    publisher.remove()
    writer.close()


class _Watchdog(threading.Thread):
    """Watches its trainer until it is silent for too long, then exchanges records once."""

    def __init__(self, record: Path, mesh: Mesh, run_dir: Path, exchange: _Exchange) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.closing = threading.Event()
        self._reader, self._watch = ProgressReader(record), SilenceDetector(QUICK)
        self._mesh, self._run_dir, self._exchange = mesh, run_dir, exchange

    def run(self) -> None:
        while not self.closing.wait(QUICK.poll_seconds):
            now = time.monotonic()
            progress = self._reader.glance(now)
            if progress is not None and self._watch.is_due(
                progress, self._reader.step_seconds(), paused=False, now=now
            ):
                self._conclude(self._exchange(self._post()))
                return

    def _post(self) -> bytes:
        groups = tuple(self._reader.groups().values())
        return post_of(RankReport(self._reader.rank, Process.RUNNING, self._reader.read(), groups))

    def _conclude(self, posts: Sequence[bytes]) -> None:
        """Diagnose; the lowest rank that answered records the incident. There is no second round in which an
        absence could be confirmed."""
        groups: dict[bytes, CommGroup] = {}
        found = [Post(each, len(self._mesh)).report(groups) for each in posts]
        reports = {each.rank: each for each in found}
        if not reports or min(reports) != self._reader.rank:
            return
        absent = frozenset(range(len(self._mesh))) - reports.keys()
        for incident in diagnose(Round(reports, self._mesh, confirmed=absent)).incidents:
            RunWriter(self._run_dir, self._reader.rank).record(incident)
