"""Hang localization by a thread of the trainer, in place of the out-of-band observer (paper, section 7).

The same record of progress, the same threshold and the same diagnosis; only the process that looks is
missing. Ranks confer either by an all-gather on a group of their own, as the paper's observers do, or by
posts that are read after a deadline, so that whoever has not posted is absent.
"""

from __future__ import annotations

import datetime
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchscout.adapters.registry import adapter_for
from torchscout.campaign.cell import JobLayout
from torchscout.campaign.observed import QUICK, TRAIN, ObservedRankResult, be_quiet, firings_of, steps
from torchscout.campaign.training import Training
from torchscout.collectives.interceptor import listen
from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import CommGroup, Process, RankStatus
from torchscout.decision.recorder import JsonlRecorder
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.silence import SilenceDetector

__all__ = ["train_gathering", "train_posting"]

_DEADLINE_SECONDS = 1.0

_Post = dict[str, Any]
_Confer = Callable[[_Post], Sequence[_Post]]
"""From this rank's post to those of all that answered; of none where that failed."""


def train_gathering(
    rank: int, questions: Iterator[Any], layout: JobLayout, faults: FaultPlan, run_dir: Path
) -> Iterator[ObservedRankResult]:
    """As ``observed.train``, with a thread that confers by an all-gather."""
    patience = datetime.timedelta(seconds=QUICK.round_deadline_seconds + 2.0)
    group = dist.new_group(timeout=patience, group_desc="watchdog")

    def confer(post: _Post) -> Sequence[_Post]:
        posts: list[Any] = [None] * layout.ranks
        try:
            dist.all_gather_object(posts, post, group=group)
        except RuntimeError:  # somebody did not take part
            return []
        return posts

    yield from _train(rank, questions, layout, faults, run_dir, confer)


def train_posting(
    rank: int, questions: Iterator[Any], layout: JobLayout, faults: FaultPlan, run_dir: Path
) -> Iterator[ObservedRankResult]:
    """As ``observed.train``, with a thread that posts, and reads what others have posted in time."""
    board = run_dir / "posts"
    board.mkdir(exist_ok=True)

    def confer(post: _Post) -> Sequence[_Post]:
        unfinished = board / f".{rank}"
        unfinished.write_text(json.dumps(post))
        unfinished.rename(board / f"{rank}.json")
        time.sleep(_DEADLINE_SECONDS)
        return [json.loads(path.read_text()) for path in sorted(board.glob("*.json"))]

    yield from _train(rank, questions, layout, faults, run_dir, confer)


def _train(
    rank: int, questions: Iterator[Any], layout: JobLayout, faults: FaultPlan, run_dir: Path, confer: _Confer
) -> Iterator[ObservedRankResult]:
    be_quiet(run_dir)
    training = Training(layout)
    adapter = adapter_for(training.model, training.optimizer, layout.mesh() if layout.tensor > 1 else None)
    mesh = adapter.mesh([socket.gethostname()] * layout.ranks)
    writer = ProgressWriter.create(run_dir / f"record-{rank}", rank)
    publisher = Publisher(writer)
    publisher.watch_layers(adapter.layers())
    publisher.watch_updates(adapter.hook_updates)
    log = firings_of(run_dir) / f"rank-{rank}.jsonl"
    watchdog = _Watchdog(writer.path, mesh, run_dir, confer)
    with listen(publisher), Injector(faults, rank, training.net, training.optimizer, log=log) as injector:
        watchdog.start()
        for question in questions:
            if question == TRAIN:
                steps(training, publisher.watch_input(injector.input(training.batches())))
            yield ObservedRankResult([])
        watchdog.closing.set()
        watchdog.join(timeout=_DEADLINE_SECONDS)
    publisher.remove()
    writer.close()


class _Watchdog(threading.Thread):
    """Looks at its own trainer until that is silent for too long, then confers, once."""

    def __init__(self, record: Path, mesh: Mesh, run_dir: Path, confer: _Confer) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.closing = threading.Event()
        self._reader, self._watch = ProgressReader(record), SilenceDetector(QUICK)
        self._mesh, self._run_dir, self._confer = mesh, run_dir, confer

    def run(self) -> None:
        while not self.closing.wait(QUICK.poll_seconds):
            now = time.monotonic()
            progress = self._reader.glance(now)
            if progress is not None and self._watch.is_due(
                progress, self._reader.step_seconds(), paused=False, now=now
            ):
                self._conclude(self._confer(self._post()))
                return

    def _post(self) -> _Post:
        standing = RankStatus(self._reader.rank, Process.RUNNING, self._reader.read())
        lines = [
            [each.key, list(each.members), each.name, each.pair] for each in self._reader.lines().values()
        ]
        return {"standing": standing.to_json(), "lines": lines}

    def _conclude(self, posts: Sequence[_Post]) -> None:
        """The first of those that answered writes it down."""
        standings = [RankStatus.from_json(each["standing"]) for each in posts]
        if not standings or min(each.rank for each in standings) != self._reader.rank:
            return
        lines = {
            key: CommGroup(key, tuple(members), name, pair)
            for each in posts
            for key, members, name, pair in each["lines"]
        }
        incident = diagnose(standings, lines, self._mesh)
        if incident is not None:
            JsonlRecorder(self._run_dir, self._reader.rank).record(incident)
