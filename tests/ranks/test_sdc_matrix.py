"""The paper's three-step protocol, cell by cell: clean, one fault on one rank at one place, clean.

At the fault exactly that rank and that surface are named, before and after it nothing is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.replayed_job import (
    REPLAY,
    Found,
    Net,
    checked_training,
    due_layer,
    due_parameter,
)
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

RANKS, SAMPLED = 4, 13
PARAMETERS = ["/".join(name.rsplit(".", 1)) for name, _ in Net().named_parameters()]
SLOTS = ("exp_avg", "exp_avg_sq", "step")
WITHIN_A_LAYER = [name.split("/", 1) for name in PARAMETERS if name.startswith("stack.0")]


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault, and the surfaces that may and must differ because of it."""

    rank: int
    at: str
    must: frozenset[str]
    may: frozenset[str] = frozenset()
    calls: range | None = REPLAY
    bit: int | None = None
    """Chosen at random where not given."""
    index: int = 0
    """Of the element."""


def computed(step: int) -> list[tuple[str, str]]:
    """Places where a rank computes something wrong in replay, and the surface where that shows."""
    layer = due_layer(step)
    places = [(f"{module}/output", f"{module}/output") for module in ("tokens", layer, "head")]
    places += [(f"{module}/grad_input", f"{module}/grad_input") for module in (layer, "head")]
    weights = ["tokens/weight", "head/weight", "head/bias"]
    weights += [f"{layer}{path.removeprefix('stack.0')}/{name}" for path, name in WITHIN_A_LAYER]
    return places + [(f"{weight}.gradient", f"{weight}.grad") for weight in weights]


def held(step: int) -> list[tuple[str, frozenset[str], frozenset[str]]]:
    """Places where a rank holds something wrong after its update; what must differ, and what may."""
    places, due = [], due_parameter(step)
    for name in PARAMETERS:
        module = next(each for each in ("tokens", due_layer(step), "head", "") if name.startswith(each))
        must = {name} | ({f"{module}/parameters"} if module else set())
        if name == due:
            must |= {"optimizer/update", "optimizer/reproduced"}
        places.append((name, frozenset(must), frozenset[str]()))
        places += [(f"{name}.{slot}", frozenset({f"{name}.{slot}"}), frozenset[str]()) for slot in SLOTS]
    return places


def cells(every: int = 1) -> list[Cell]:
    """Each rank at every place, or at one place in ``every``; the first 64 flip the lowest bit."""
    found: list[Cell] = []
    for rank in range(RANKS):
        step, first = fault_step(len(found)), rank % every
        for place in range(first, len(computed(step)), every):
            at, surface = computed(fault_step(len(found)))[place]
            found.append(Cell(rank, at, frozenset({surface})))
        for place in range(first, len(held(step)), every):
            at, must, may = held(fault_step(len(found)))[place]
            found.append(Cell(rank, at, must, may, calls=range(1)))
        for place in range(first, RECEIVED, every):
            found.append(received(rank, place * APART, fault_step(len(found))))
    return found


RECEIVED, APART = 12, 2100
"""Bytes of what travels in a check, all together: inputs, gradients and random states of three modules."""


def received(rank: int, index: int, step: int) -> Cell:
    """What comes from the source arrives wrong. Which of the aligned things it is depends on the byte."""
    inputs = frozenset({"tokens/input", f"{due_layer(step)}/input", "head/input", "optimizer/input"})
    return Cell(rank, "broadcast@torchscout", frozenset(), inputs, calls=range(1), index=index)


def fault_step(cell: int) -> int:
    return 3 * cell + 2


def plan(wanted: Sequence[Cell], seed: int) -> FaultPlan:
    choose, faults = random.Random(seed), FaultPlan()
    for place, cell in enumerate(wanted):
        # Not an exponent's: a slot or weight of 1e38 would spoil what the next cells compare.
        bit = cell.bit if cell.bit is not None else choose.choice([*range(1, 23), 31])
        bit = 0 if place % len(wanted) < 64 or "broadcast" in cell.at else bit
        faults = faults.flip_bit(
            rank=cell.rank, at=cell.at, step=fault_step(place), bit=bit, index=cell.index, calls=cell.calls
        )
    return faults


def differing(records: Iterable[EvidenceRecord], step: int) -> dict[str, tuple[int, ...]]:
    return {record.surface: record.ranks for record in records if record.step == step and record.scope}


def check(wanted: Sequence[Cell], found: Sequence[Found], truths: Sequence[GroundTruth]) -> None:
    for rank, result in enumerate(found):
        assert result.failures == []
        assert result.unfired == 0
        for place, cell in enumerate(wanted):
            step = fault_step(place)
            names = differing(result.records, step)
            where = f"cell {place}, rank {rank}: {cell}: {names}"
            assert cell.must <= names.keys() <= cell.must | cell.may, where
            assert names, where
            assert set(names.values()) == {(cell.rank,)}, where
            assert not differing(result.records, step - 1), where
            assert not differing(result.records, step + 1), where
    fired = sorted((firing.step, firing.rank) for result in found for firing in result.fired)
    assert sorted(set(fired)) == [(fault_step(place), cell.rank) for place, cell in enumerate(wanted)]
    incidents = [each for each in found[0].incidents if each.manifestation is Manifestation.SDC]
    assert sorted(each.step for each in incidents) == [fault_step(place) for place in range(len(wanted))]
    for incident in incidents:
        place = (incident.step - 2) // 3
        assert incident.ranks == (wanted[place].rank,), incident.sentence
        assert truths[place].matches(incident), (truths[place], incident.sentence)


def run(wanted: Sequence[Cell], run_dir: Path, *, seed: int = 0, timeout: float = 600) -> None:
    mended = [(fault_step(place), (cell.rank + 1) % RANKS) for place, cell in enumerate(wanted)]
    steps = 3 * len(wanted)
    faults = plan(wanted, seed)
    faults.check(RANKS, Net())
    found = run_ranks(checked_training, RANKS, faults, steps, mended, run_dir, timeout=timeout)
    check(wanted, found, faults.truth(Mesh.grid(replica=RANKS)))


@pytest.mark.slow
def test_a_sample_of_the_matrix_is_localized(tmp_path: Path):
    """Every rank has a few of the places, and of each kind at least one."""
    run(cells(every=SAMPLED), tmp_path)


@pytest.mark.slow
def test_every_cell_is_localized(tmp_path: Path):
    run(cells(), tmp_path)
