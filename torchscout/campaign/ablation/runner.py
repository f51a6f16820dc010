"""Runs the cells with the whole method, then without one component."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchscout.campaign.ablation.variants import (
    EVERYTHING,
    Claim,
    RawStepTimes,
    claims_of,
    coordinate_vote,
    first_to_differ,
    first_to_time_out,
    judged,
    pieces_for,
    unconfirmed,
)
from torchscout.campaign.ablation.watchdog import train_gathering, train_posting
from torchscout.campaign.cells.cell import Cell, JobLayout
from torchscout.campaign.cells.observed import observe, run_concurrently
from torchscout.campaign.cells.warm import WARMUP, Slot, WarmRankResult, run_warm
from torchscout.campaign.results import Result
from torchscout.config import StragglerConfig
from torchscout.decision.progress import RankReport
from torchscout.decision.types import EvidenceRecord, Incident
from torchscout.errors import TornRecordError
from torchscout.observer.record.reader import ProgressReader
from torchscout.run.reader import Follower, IncidentLog, read_run

__all__ = ["judged_warm", "run_ablated_hangs"]


def _statuses(run_dir: Path) -> list[RankReport]:
    """The status of every rank that has a progress record."""
    found = []
    for entry in read_run(run_dir).entries:
        with suppress(FileNotFoundError, TornRecordError):
            reader = ProgressReader(Path(entry.record))
            found.append(RankReport(entry.rank, reader.trainer(), reader.read()))
    return found


def judged_warm(cells: Sequence[Cell], folder: Path, seed: int) -> Generator[Result, None, None]:
    """Run warm cells; each result has what was decided without a component."""
    return run_warm(cells, folder, seed, judge=_Judge)


def run_ablated_hangs(cells: Sequence[Cell], folder: Path, jobs: int) -> Generator[Result, None, None]:
    """Run cells that may hang; each result has what was decided without a component."""
    return run_concurrently(_hang, cells, folder, jobs)


class _Judge:
    """Decides from the records of warm ranks; keeps the step times of one set of ranks."""

    def __init__(self, layout: JobLayout) -> None:
        self._config = StragglerConfig().on_host()
        self._raw = RawStepTimes(layout.mesh(), self._config)
        self._records: dict[int, Follower] = {}
        self._incidents: IncidentLog | None = None

    def judge(self, slot: Slot, answers: Sequence[WarmRankResult], run_dir: Path) -> Mapping[str, str]:
        self._incidents = self._incidents or IncidentLog(run_dir)
        for rank in range(len(answers)):
            self._records.setdefault(rank, Follower(run_dir / "records" / f"rank-{rank}.jsonl"))
        written = {rank: list(file.fresh()) for rank, file in self._records.items()}
        items = [line.item for lines in written.values() for line in lines]
        reported = [line.item for line in self._incidents.new()]
        claims = {
            EVERYTHING: claims_of(each for each in reported if isinstance(each, Incident)),
            "majority": first_to_differ(written),
            "confirmation": unconfirmed(
                (each for each in items if isinstance(each, EvidenceRecord)), self._config
            ),
            "controlled_replay": self._by_step_times(answers),
        }
        return _outcomes(slot.cell, claims)

    def _by_step_times(self, answers: Sequence[WarmRankResult]) -> set[Claim]:
        claims: set[Claim] = set()
        for step in answers[0].step_seconds:
            if step >= WARMUP:
                claims |= self._raw.observe(step, [each.step_seconds[step] for each in answers])
        return claims


def _hang(cell: Cell, run_dir: Path, stop: threading.Event) -> Result:
    last: list[RankReport] = []
    """The statuses of all ranks when they were last read together, before observers asked for stacks."""

    def look(whole: Path) -> None:
        found = _statuses(whole)
        if len(found) == cell.place.ranks:  # a rank that gives up removes its record
            last[:] = found

    seen = observe(cell, run_dir / "whole", stop, look=look)
    claims = {
        EVERYTHING: claims_of(seen.incidents),
        "majority": first_to_time_out(last),
        "wait_graph": coordinate_vote(last, cell.place.mesh()),
    }
    for key, body in (("observer", train_gathering), ("observer_posting", train_posting)):
        claims[key] = claims_of(observe(cell, run_dir / key, stop, body=body).incidents)
    result = seen.grade(cell)
    if result.grade.passed:
        shutil.rmtree(run_dir)
    return replace(result, ablated=_outcomes(cell, claims))


def _outcomes(cell: Cell, claims: Mapping[str, set[Claim]]) -> dict[str, str]:
    wanted = {EVERYTHING, *pieces_for(cell.row)}
    return {key: judged(cell.truths, each).value for key, each in claims.items() if key in wanted}
