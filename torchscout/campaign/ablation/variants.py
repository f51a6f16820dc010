"""The components that are left out, the cells that show the difference, and the decisions without them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from torchscout.campaign.cells.cell import LAYOUTS, Cell, Processes, Row
from torchscout.campaign.cells.paper_cells import FAULTY, SLOW, hang_cells, numerical_cells, slow_layers
from torchscout.campaign.results import Result, interval
from torchscout.campaign.tables import printed
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact
from torchscout.decision.progress import RankReport
from torchscout.decision.straggler import COMPUTATION, RankStragglers
from torchscout.decision.timings import PeerTimes, Work
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.run.reader import Stamped
from torchscout.testing.transformer import TINY
from torchscout.utils.text import wrapped

__all__ = [
    "EVERYTHING",
    "HEADS",
    "PIECES",
    "ROWS",
    "Claim",
    "Outcome",
    "Piece",
    "RawStepTimes",
    "ablation_cells",
    "ablations",
    "claims_of",
    "coordinate_vote",
    "figures",
    "first_to_differ",
    "first_to_time_out",
    "judged",
    "pieces_for",
    "screen_of",
    "unconfirmed",
]

EVERYTHING = "everything"
"""The key of the whole method's decision."""

ROWS = (
    Row("sdc", "SDC", "one forward output or parameter of one rank"),
    Row("nondeterminism", "Nondeterministic kernel", "different ranks differ each time: none is faulty"),
    Row("straggler", "Compute straggler", "one rank's layers take 250 ms longer"),
    Row("transient", "Slow once", "one rank's layers take 250 ms longer in one step: none is faulty"),
    Row("clean", "Fault-free", "nothing"),
    Row("hang", "Hang and input stall", "one rank late, frozen, without input, or in another collective"),
    Row("hang-clean", "Fault-free, observed", "nothing"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A component of the method, and its replacement."""

    key: str
    title: str
    instead: str
    rows: tuple[str, ...]
    """The rows of cells that can show a difference."""


PIECES = (
    Piece(
        "majority",
        "Majority",
        "the first rank to report is blamed: the first to record that numbers differ, or the first whose "
        "collective times out",
        ("sdc", "clean", "hang", "hang-clean"),
    ),
    Piece(
        "confirmation",
        "Confirmation",
        "one replay that differs, or one slow round, is enough",
        ("sdc", "nondeterminism", "straggler", "transient", "clean"),
    ),
    Piece(
        "wait_graph",
        "Wait graph",
        "ranks whose progress differs from the majority of their peers are blamed",
        ("hang", "hang-clean"),
    ),
    Piece(
        "controlled_replay",
        "Controlled replay",
        "the step times of ranks are compared, with the same rule and confirmations",
        ("straggler", "transient", "clean"),
    ),
    Piece(
        "observer",
        "Out-of-band observer",
        "a thread of the trainer, which exchanges records by an all-gather on its own process group",
        ("hang", "hang-clean"),
    ),
    Piece(
        "observer_posting",
        "Out-of-band observer, posts kept",
        "a thread of the trainer, which exchanges records by posts that are read after a deadline",
        ("hang", "hang-clean"),
    ),
)


def pieces_for(row: str) -> list[str]:
    """The keys of the components that cells of this row can show a difference for."""
    return [piece.key for piece in PIECES if row in piece.rows]


def first_to_differ(written: Mapping[int, Sequence[Stamped]]) -> set[Claim]:
    """Without a majority: the first rank to record that numbers differ is blamed.

    ``written`` has the records of each rank.
    """
    moments = [
        (line.monotonic, rank)
        for rank, lines in written.items()
        for line in lines
        if isinstance(line.item, EvidenceRecord)
        and line.item.manifestation is Manifestation.SDC
        and line.item.scope is not None
    ]
    return {Claim(Manifestation.SDC, (min(moments)[1],))} if moments else set()


def first_to_time_out(statuses: Iterable[RankReport]) -> set[Claim]:
    """Without a majority: the rank that has waited longest inside a collective times out first."""
    waiting = [
        each.progress for each in statuses if each.progress is not None and each.progress.at_communication
    ]
    if not waiting:
        return set()
    first = max(waiting, key=lambda progress: progress.silent_seconds)
    return {Claim(Manifestation.HANG, (first.rank,))}


def unconfirmed(records: Iterable[EvidenceRecord], config: StragglerConfig) -> set[Claim]:
    """Without confirmation: one replay that differs, or one slow round, is enough."""
    claims = set()
    for record in records:
        if not record.ranks:
            continue
        if record.manifestation is Manifestation.SDC:
            claims.add(Claim(Manifestation.SDC, record.ranks))
        elif record.surface in COMPUTATION:
            claims |= {Claim(Manifestation.STRAGGLER, (rank,)) for rank in _materially_slow(record, config)}
    return claims


def _materially_slow(record: EvidenceRecord, config: StragglerConfig) -> list[int]:
    times = PeerTimes.of(record, config)
    slower = set() if times is None else {each.rank for each in times.slower()}
    return [rank for rank in record.ranks if rank in slower]


class RawStepTimes:
    """Without controlled replay: the duration of each rank's training step, diagnosed like replayed layers.

    Only the measurement differs: outliers, materiality and confirmation are the same.
    """

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._diagnosis, self._config = RankStragglers(mesh, config), config

    def observe(self, step: int, seconds: Sequence[float]) -> set[Claim]:
        """What the step times of one step, by rank, lead to."""
        ranks, times = np.arange(len(seconds))[np.newaxis], 1e3 * np.array([seconds])
        compared = PeerTimes(step, Work("time/module", "", ()), ranks, times, self._config)
        return claims_of(self._diagnosis.observe([compared]))


def coordinate_vote(statuses: Sequence[RankReport], mesh: Mesh) -> set[Claim]:
    """Without the wait graph: ranks whose progress differs from the majority of their peers are blamed."""
    where = {each.rank: (-1, -1) if each.progress is None else each.progress.coordinate for each in statuses}
    behind: list[int] = []
    for group in mesh.peer_groups():
        peers = [rank for rank in group.ranks if rank in where]
        numbers = [(where[rank][0] << 32) + where[rank][1] for rank in peers]
        behind += [peers[position] for position in exact(numbers).outliers] if len(peers) > 1 else []
    return {Claim(Manifestation.HANG, tuple(sorted(behind)))} if behind else set()


class Outcome(str, Enum):
    RIGHT = "right"
    """Exactly the faulty ranks are named, or none if none is faulty."""
    WRONG = "wrong"
    """Other ranks are named."""
    MISSED = "missed"
    FALSE_ALARM = "false_alarm"
    """Ranks are named although nothing is wrong."""


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """The ranks that are named, and for what."""

    manifestation: Manifestation
    ranks: tuple[int, ...]


def claims_of(incidents: Iterable[Incident]) -> set[Claim]:
    return {Claim(each.manifestation, each.ranks) for each in incidents}


def judged(truths: Sequence[GroundTruth], claims: Iterable[Claim]) -> Outcome:
    wanted, found = {Claim(each.manifestation, each.ranks) for each in truths}, set(claims)
    if found == wanted:
        return Outcome.RIGHT
    if not found:
        return Outcome.MISSED
    return Outcome.WRONG if wanted else Outcome.FALSE_ALARM


_SDC = 24
_OF_LAYOUT = {"ddp": 4, "tensor": 3}
"""Slow ranks of each layout; twice as many are slow once."""
_HANGS = {
    ("late", "ddp-4"): 4,
    ("late", "fsdp2-4"): 4,
    ("late", "hybrid-8"): 6,
    ("frozen", "ddp-4"): 6,
    ("input", "ddp-4"): 4,
    ("other", "ddp-4"): 6,
}
_CLEAN_HANGS = 5


def ablation_cells(seed: int) -> list[Cell]:
    """All cells of the ablation; the same for the same seed."""
    choose = random.Random(seed)
    wrong = [cell for cell in numerical_cells(seed) if (cell.row, cell.layout) == ("numerical-sdc", "ddp")]
    return [
        *_slow(choose, seed),
        *(replace(cell, row="sdc") for cell in choose.sample(wrong, _SDC)),
        *_nondeterministic(choose, seed),
        *(
            Cell("clean", f"clean-{number}", layout, seed=seed)
            for layout in _OF_LAYOUT
            for number in range(3)
        ),
        *_hanging(seed),
    ]


def _slow(choose: random.Random, seed: int) -> Iterator[Cell]:
    """Cells with a rank that stays slow, or that is slow in one step only."""
    for layout, count in _OF_LAYOUT.items():
        ranks = LAYOUTS[layout].ranks
        for rank in choose.sample(range(ranks), count):
            yield Cell("straggler", f"rank-{rank}", layout, faults=slow_layers(rank, SLOW), seed=seed)
        for rank in choose.sample(range(ranks), 2 * count):
            once = slow_layers(rank, range(FAULTY, FAULTY + 1))
            yield Cell("transient", f"rank-{rank}", layout, faults=once, benign=True, seed=seed)


def _nondeterministic(choose: random.Random, seed: int) -> Iterator[Cell]:
    """Cells in which one rank differs in the first replay, and another one in the second."""
    for number in range(4):
        layer, faults = number % TINY.layers, FaultPlan()
        for call, rank in enumerate(choose.sample(range(LAYOUTS["ddp"].ranks), 2), start=1):
            at, calls = f"layer.{layer}/output", range(call, call + 1)
            faults = faults.flip_bit(rank=rank, at=at, step=FAULTY, bit=3, index=number, calls=calls)
        name = f"kernel-{number}"
        yield Cell("nondeterminism", name, "ddp", faults=faults, benign=True, due=layer, seed=seed)


def _hanging(seed: int) -> Iterator[Cell]:
    every = hang_cells(seed)
    for (kind, layout), count in _HANGS.items():
        matching = [cell for cell in every if (cell.name.split("-")[0], cell.layout) == (kind, layout)]
        yield from matching[:count]
    for number in range(_CLEAN_HANGS):
        layout = ("ddp-4", "fsdp2-4", "hybrid-8")[number % 3]
        yield Cell("hang-clean", f"clean-{number}", layout, Processes.OBSERVED, seed=seed)


HEADS = (
    "left out",
    "cells",
    "right with it",
    "right without",
    "95% interval",
    "wrong names",
    "false alarms",
    "missed",
)


def ablations(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each component that any of these results is about."""
    about = [(piece, [each for each in results if piece.key in each.ablated]) for piece in PIECES]
    return [_row(piece, cells) for piece, cells in about if cells]


def _row(piece: Piece, cells: Sequence[Result]) -> dict[str, Any]:
    without = Counter(each.ablated[piece.key] for each in cells)
    whole = Counter(each.ablated[EVERYTHING] for each in cells)
    low, high = interval(without[Outcome.RIGHT.value], len(cells))
    return {
        "piece": piece.key,
        "title": piece.title,
        "instead": piece.instead,
        "cells": len(cells),
        "right_with": whole[Outcome.RIGHT.value],
        "interval": [low, high],
        **{outcome.value: without[outcome.value] for outcome in Outcome},
    }


def figures(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row, in the order of ``HEADS``."""
    low, high = row["interval"]
    return [
        row["title"],
        *(str(row[name]) for name in ("cells", "right_with", "right")),
        f"{100 * low:.1f} to {100 * high:.1f}",
        *(str(row[name]) for name in ("wrong", "false_alarm", "missed")),
    ]


def screen_of(report: Mapping[str, Any], folder: str) -> str:
    lines = [printed(HEADS, [*map(figures, report["ablations"])])]
    lines += [wrapped(f"{row['title']}: {row['instead']}", indent=2) for row in report["ablations"]]
    lines += [wrapped(f"FAILED  {each['cell']}: {each['reason']}") for each in report["failed"]]
    return "\n".join([*lines, wrapped(f"results    {folder}/results.jsonl")])
