"""Runs the cells with the whole method, then without one component."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
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
from torchscout.campaign.cell import Cell, JobLayout, Processes
from torchscout.campaign.observed import graded, observe, run_at_once
from torchscout.campaign.results import Result
from torchscout.campaign.warm import WARMUP, Slot, WarmRankResult, run_warm
from torchscout.config import StragglerConfig
from torchscout.decision.progress import RankStatus
from torchscout.decision.record import EvidenceRecord, Incident
from torchscout.decision.recorder import Follower, IncidentLog
from torchscout.errors import TornRecordError
from torchscout.observer.record.directory import read_roster
from torchscout.observer.record.reader import ProgressReader

__all__ = ["run_ablated", "standings"]


def standings(run_dir: Path) -> list[RankStatus]:
    """Of every rank whose record is there."""
    found = []
    for entry in read_roster(run_dir):
        with suppress(FileNotFoundError, TornRecordError):
            reader = ProgressReader(Path(entry.record))
            found.append(RankStatus(entry.rank, reader.trainer(), reader.read()))
    return found


def run_ablated(cells: Sequence[Cell], folder: Path, seed: int, jobs: int) -> Generator[Result, None, None]:
    """Results as they come, each with what was decided without a piece."""
    for (processes, layout), group in groupby(sorted(cells, key=_group), key=_group):
        place, together = folder / "evidence" / f"{processes}-{layout}", list(group)
        if processes == Processes.WARM.value:
            yield from run_warm(together, place, seed, judge=_Judge)
        else:
            yield from run_at_once(_hang, together, place, jobs)


def _group(cell: Cell) -> tuple[str, str]:
    return cell.processes.value, cell.layout


class _Judge:
    """Decides on what warm ranks wrote down; remembers the step times of one set of them."""

    def __init__(self, layout: JobLayout) -> None:
        self._config = StragglerConfig().on_host()
        self._raw = RawStepTimes(layout.mesh(), self._config)
        self._records: dict[int, Follower] = {}
        self._incidents: IncidentLog | None = None

    def judge(self, slot: Slot, told: Sequence[WarmRankResult], run_dir: Path) -> Mapping[str, str]:
        self._incidents = self._incidents or IncidentLog(run_dir, strict=True)
        for rank in range(len(told)):
            path = run_dir / "records" / f"rank-{rank}.jsonl"
            self._records.setdefault(rank, Follower(path, strict=True))
        written = {rank: list(file.fresh()) for rank, file in self._records.items()}
        items = [line.item for lines in written.values() for line in lines]
        reported = [line.item for line in self._incidents.new()]
        claims = {
            EVERYTHING: claims_of(each for each in reported if isinstance(each, Incident)),
            "majority": first_to_differ(written),
            "confirmation": unconfirmed(
                (each for each in items if isinstance(each, EvidenceRecord)), self._config
            ),
            "controlled_replay": self._by_step_times(told),
        }
        return _outcomes(slot.cell, claims)

    def _by_step_times(self, told: Sequence[WarmRankResult]) -> set[Claim]:
        claims: set[Claim] = set()
        for step in told[0].step_seconds:
            if step >= WARMUP:
                claims |= self._raw.observe(step, [each.step_seconds[step] for each in told])
        return claims


class _LastStandings:
    """Where all ranks stood when they were last seen together, before anybody asked."""

    def __init__(self, ranks: int) -> None:
        self.standings: list[RankStatus] = []
        self._ranks = ranks

    def look(self, run_dir: Path) -> None:
        found = standings(run_dir)
        if len(found) == self._ranks:  # who has given up takes its record along
            self.standings = found


def _hang(cell: Cell, run_dir: Path, stop: threading.Event) -> Result:
    last = _LastStandings(cell.place.ranks)
    seen = observe(cell, run_dir / "whole", stop, look=last.look)
    claims = {
        EVERYTHING: claims_of(seen.incidents),
        "majority": first_to_time_out(last.standings),
        "wait_graph": coordinate_vote(last.standings, cell.place.mesh()),
    }
    for key, body in (("observer", train_gathering), ("observer_posting", train_posting)):
        claims[key] = claims_of(observe(cell, run_dir / key, stop, body=body).incidents)
    result = graded(cell, seen)
    if result.grade.passed:
        shutil.rmtree(run_dir)
    return replace(result, ablated=_outcomes(cell, claims))


def _outcomes(cell: Cell, claims: Mapping[str, set[Claim]]) -> dict[str, str]:
    truths, wanted = cell.truths, {EVERYTHING, *pieces_for(cell.row)}
    return {key: judged(truths, told).value for key, told in claims.items() if key in wanted}
