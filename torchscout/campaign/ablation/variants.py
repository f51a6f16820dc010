"""Which component is left out of the method in which cells, and what is then decided."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torchscout.campaign.cell import BLOCKS, LAYOUTS, Cell, Processes, Row
from torchscout.campaign.paper_cells import FAULTY, SLOW, hang_cells, numerical_cells, slow_layers
from torchscout.campaign.results import Result, interval
from torchscout.campaign.tables import printed
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.progress import RankStatus
from torchscout.decision.record import EvidenceRecord, Incident, Manifestation
from torchscout.decision.recorder import Stamped
from torchscout.decision.straggler.persistence import Times
from torchscout.decision.straggler.ranks import COMPUTATION, RankStragglers
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
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
"""The key of what the whole method decides."""

ROWS = (
    Row("sdc", "SDC", "one forward output or parameter of one rank"),
    Row("nondeterminism", "Nondeterministic kernel", "other ranks differ each time: nobody is sick"),
    Row("straggler", "Compute straggler", "one rank's layers take 250 ms longer"),
    Row("transient", "Slow once", "one rank's layers take 250 ms longer in one step: nobody is sick"),
    Row("clean", "Fault-free", "nothing"),
    Row("hang", "Hang and input stall", "one rank late, frozen, without input, or in another collective"),
    Row("hang-clean", "Fault-free, observed", "nothing"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that the method has, and what is done in its place."""

    key: str
    title: str
    instead: str
    rows: tuple[str, ...]
    """Of the cells that can tell the difference."""


PIECES = (
    Piece(
        "majority",
        "Majority",
        "whoever reports first is blamed: the first to write down that numbers differ, or the first whose "
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
        "whoever stands elsewhere than the majority of its peers is blamed",
        ("hang", "hang-clean"),
    ),
    Piece(
        "controlled_replay",
        "Controlled replay",
        "each rank's own step times are compared, with the same rule and confirmations",
        ("straggler", "transient", "clean"),
    ),
    Piece(
        "observer",
        "Out-of-band observer",
        "a thread of the trainer, conferring by an all-gather on a group of its own",
        ("hang", "hang-clean"),
    ),
    Piece(
        "observer_posting",
        "Out-of-band observer, posts kept",
        "a thread of the trainer, conferring by posts that are read after a deadline",
        ("hang", "hang-clean"),
    ),
)


def pieces_for(row: str) -> list[str]:
    """The keys of those that a cell of this row has to do with."""
    return [piece.key for piece in PIECES if row in piece.rows]


def first_to_differ(written: Mapping[int, Sequence[Stamped]]) -> set[Claim]:
    """Without a majority: peers see that their numbers differ, and whoever says so first is blamed.

    ``written`` has what each rank wrote down.
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


def first_to_time_out(standings: Iterable[RankStatus]) -> set[Claim]:
    """Without a majority: the rank that has waited longest inside a collective is the first to give up."""
    waiting = [
        each.progress for each in standings if each.progress is not None and each.progress.at_communication
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
    times = Times.of(record)
    if times is None:
        return []
    slower = times.slower(config)
    return [rank for rank in record.ranks if rank in slower]


class RawStepTimes:
    """Without controlled replay: how long each rank's own step took, judged as replayed layers are.

    Only the measurement differs: outliers, materiality and confirmation are the same.
    """

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._diagnosis = RankStragglers(mesh, config)

    def observe(self, step: int, seconds: Sequence[float]) -> set[Claim]:
        """``seconds`` by rank."""
        record = EvidenceRecord(
            step=step,
            surface="time/module",
            manifestation=Manifestation.STRAGGLER,
            peers=tuple(range(len(seconds))),
            verdict=statistical([1e3 * each for each in seconds]),
        )
        return claims_of(self._diagnosis.observe([record]))


def coordinate_vote(standings: Sequence[RankStatus], mesh: Mesh) -> set[Claim]:
    """Without the wait graph: whoever stands elsewhere than the majority of its peers is blamed."""
    where = {each.rank: (-1, -1) if each.progress is None else each.progress.coordinate for each in standings}
    behind: list[int] = []
    for group in mesh.peer_groups():
        peers = [rank for rank in group.ranks if rank in where]
        numbers = [(where[rank][0] << 32) + where[rank][1] for rank in peers]
        behind += [peers[position] for position in exact(numbers).outliers] if len(peers) > 1 else []
    return {Claim(Manifestation.HANG, tuple(sorted(behind)))} if behind else set()


class Outcome(str, Enum):
    RIGHT = "right"
    """Exactly those are named that are at fault, or nobody where nobody is."""
    WRONG = "wrong"
    """Others are named, or others too."""
    MISSED = "missed"
    FALSE_ALARM = "false_alarm"
    """Somebody is named, and nothing is wrong."""


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """Who is named, for what."""

    manifestation: Manifestation
    ranks: tuple[int, ...]


def claims_of(incidents: Iterable[Incident]) -> set[Claim]:
    return {Claim(each.manifestation, each.ranks) for each in incidents}


def judged(truths: Sequence[GroundTruth], claims: Iterable[Claim]) -> Outcome:
    wanted, told = {Claim(each.manifestation, each.ranks) for each in truths}, set(claims)
    if told == wanted:
        return Outcome.RIGHT
    if not told:
        return Outcome.MISSED
    return Outcome.WRONG if wanted else Outcome.FALSE_ALARM


_SDC = 24
_OF_LAYOUT = {"ddp": 4, "tensor": 3}
"""Slow ranks; twice as many are slow once."""
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
    """The same for the same seed."""
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
    """Ranks that stay slow, and ranks that are slow in one step only."""
    for layout, count in _OF_LAYOUT.items():
        ranks = LAYOUTS[layout].ranks
        for rank in choose.sample(range(ranks), count):
            yield Cell("straggler", f"rank-{rank}", layout, faults=slow_layers(rank, SLOW), seed=seed)
        for rank in choose.sample(range(ranks), 2 * count):
            once = slow_layers(rank, range(FAULTY, FAULTY + 1))
            yield Cell("transient", f"rank-{rank}", layout, faults=once, benign=True, seed=seed)


def _nondeterministic(choose: random.Random, seed: int) -> Iterator[Cell]:
    """In the first replay one rank differs, in the second another one."""
    for number in range(4):
        block, faults = number % BLOCKS, FaultPlan()
        for call, rank in enumerate(choose.sample(range(LAYOUTS["ddp"].ranks), 2), start=1):
            at, calls = f"blocks.{block}/output", range(call, call + 1)
            faults = faults.flip_bit(rank=rank, at=at, step=FAULTY, bit=3, index=number, calls=calls)
        yield Cell(
            "nondeterminism", f"kernel-{number}", "ddp", faults=faults, benign=True, due=block, seed=seed
        )


def _hanging(seed: int) -> Iterator[Cell]:
    every = hang_cells(seed)
    for (kind, layout), count in _HANGS.items():
        yield from [cell for cell in every if (cell.name.split("-")[0], cell.layout) == (kind, layout)][
            :count
        ]
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
    """One for each piece that some of the cells have to do with."""
    found = []
    for piece in PIECES:
        cells = [each for each in results if piece.key in each.ablated]
        if cells:
            found.append(_of(piece, cells))
    return found


def _of(piece: Piece, cells: Sequence[Result]) -> dict[str, Any]:
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
    """One row of the table, as text."""
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
