"""A job with all parts on, disturbed at random for a while, trains on and loses no checkpoint.

``SCOUT_CHAOS`` has the seconds, ``SCOUT_CHAOS_SEED`` repeats what a seed made happen, as far as time does.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos import DISTURBANCES, MEMORY, Chaos, launched, steps_of
from tests.support.chaos_job import INTERVAL, Life, alone
from tests.support.machines import Machine, machines, why_impossible
from tests.support.ranks import run_ranks
from tests.support.small_job import until
from tests.support.wall_clock import WallClock
from tests.support.wall_clock import why_impossible as why_no_clock
from torchscout.decision.types import Incident
from torchscout.run.reader import Stamped, incident_lines
from torchscout.utils.procfs import is_running

SECONDS = float(os.environ.get("SCOUT_CHAOS", "60"))
SEED = int(os.environ.get("SCOUT_CHAOS_SEED", time.time_ns() % 1_000_000))
RANKS = 8
REASON = why_impossible() or why_no_clock()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def kinds(chance: random.Random) -> Iterator[str]:
    """Every kind of disturbance in turn, in another order each time."""
    while True:
        yield from chance.sample(sorted(DISTURBANCES), len(DISTURBANCES))


def run_under_disturbances(chaos: Chaos) -> list[Life]:
    """Disturb the job until it is time and each kind has happened; then let it train on and end."""
    deadline, lives, shown = time.monotonic() + SECONDS, [], 0
    waiting = kinds(chaos.chance)
    chaos.begin(0)
    chaos.goes_on()
    while time.monotonic() < deadline or set(DISTURBANCES) - set(chaos.happened):
        kind = next(waiting)
        chaos.disturb(kind)
        if kind == "kill_trainer":
            shown = max(shown, verified_by_all(chaos.life))
            lives.append(chaos.life)
            chaos.begin(len(lives))
            print(*reported(chaos.life.run_dir), sep="\n")
            resumed = {chaos.life.seen(rank)[0]["resumed"] for rank in range(RANKS)}
            assert len(resumed) == 1, f"ranks resumed at different steps: {resumed}"
            assert min(resumed) >= shown, f"step {shown} was verified, but the job resumed at {resumed}"
        chaos.goes_on()
    last = steps_of(chaos.life) + 60
    chaos.life.last.with_suffix(".new").write_text(str(last))
    chaos.life.last.with_suffix(".new").replace(chaos.life.last)
    assert until(lambda: chaos.exits, "the job comes to its end", 240) == dict.fromkeys(range(RANKS), 0)
    return [*lives, chaos.life]


def reported(run_dir: Path) -> list[str]:
    """The sentences of the incidents that are on record now."""
    lines = [each.item for each in incident_lines(run_dir) if isinstance(each, Stamped)]
    return [
        f"{each.manifestation.value} of {each.ranks}: {each.sentence}"
        for each in lines
        if isinstance(each, Incident)
    ]


def verified_by_all(life: Life) -> int:
    """The step that every rank's ``status`` has shown as verified."""
    shown = [
        [line["status"]["verified"] or 0 for line in life.seen(rank) if "status" in line]
        for rank in range(RANKS)
    ]
    return min(max(each, default=0) for each in shown)


def bits_of(life: Life, rank: int) -> dict[int, str]:
    """The state after each step, and first of what it began with."""
    return {line["step"]: line["bits"] for line in life.seen(rank) if "bits" in line}


def processes(host: Machine) -> list[int]:
    return [pid for pid in host.processes("") if pid != host.init and is_running(pid)]


def leaves_nothing(host: Machine, disk: Path) -> None:
    until(lambda: not processes(host), f"all processes on {host.name} end", 60)
    network = Path(f"/proc/{host.init}/net")
    for table in ("tcp", "tcp6"):
        assert [row for row in (network / table).read_text().splitlines()[1:] if row.split()[3] == "0A"] == []
    assert "torchscout" not in (network / "unix").read_text()
    files = [path for path in host.shared_memory.rglob("*") if not path.is_dir()]
    kept = host.shared_memory / MEMORY.relative_to("/dev/shm")
    assert [path for path in files if not path.is_relative_to(kept)] == []
    for folder in (kept, Path(f"/proc/{host.init}/root{disk}")):
        assert [*folder.rglob("*.writing")] == []


def typical_seconds(life: Life, steps: slice) -> float:
    return statistics.median(
        statistics.median([line["seconds"] for line in life.seen(rank) if "seconds" in line][steps])
        for rank in range(RANKS)
    )


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chaos, list[Life]]:
    print(f"SCOUT_CHAOS={SECONDS:g} SCOUT_CHAOS_SEED={SEED}", flush=True)
    folder = tmp_path_factory.mktemp("chaos")
    clock = WallClock(folder)
    with machines(folder, {"m0": ["127.0.0.1 localhost"], "m1": ["127.0.0.1 localhost"]}) as hosts:
        chaos = Chaos(hosts, folder, folder / "disk", clock, random.Random(SEED), RANKS)
        with launched(hosts, folder, chaos.disk, RANKS, clock):
            lives = run_under_disturbances(chaos)
        for host in hosts:
            leaves_nothing(host, chaos.disk)
    return chaos, lives


def test_training_is_bitwise_the_same_as_without_disturbances(disturbed: tuple[Chaos, list[Life]]):
    chaos, lives = disturbed
    print(dict(chaos.happened), "in", len(lives), "lives")
    assert set(DISTURBANCES) <= set(chaos.happened)
    assert len(lives) == chaos.happened["kill_trainer"] + 1, "nothing else ended the job"
    found = [[bits_of(life, rank) for life in lives] for rank in range(RANKS)]
    spans = [(min(bits), max(max(each[number]) for each in found)) for number, bits in enumerate(found[0])]
    expected = run_ranks(alone, RANKS, spans, timeout=300)
    for rank, of_lives in enumerate(found):
        for number, bits in enumerate(of_lives):
            wrong = [step for step in bits if bits[step] != expected[rank][number][step]]
            assert wrong == [], f"life {number} of rank {rank} has another state after these steps"


def test_no_corruption_is_reported_and_checks_continue(disturbed: tuple[Chaos, list[Life]]):
    _, lives = disturbed
    lines = [line for life in lives for rank in range(RANKS) for line in life.seen(rank)]
    incidents = [line for line in lines if "incident" in line]
    print(*incidents, sep="\n")
    assert [each for each in incidents if each["incident"] == "sdc"] == []
    for rank in range(RANKS):
        statuses = [line["status"] for line in lives[-1].seen(rank) if "status" in line]
        print(rank, statuses[-1])
        for what in ("certified", "verified"):
            assert statuses[-1][what] >= statuses[-1]["step"] - 2 * INTERVAL, f"{what} lags behind"
        assert [name for status in statuses for name, _ in status["incidents"] if name == "sdc"] == []


def test_nothing_is_left_in_trainers_and_steps_are_as_fast_as_before(disturbed: tuple[Chaos, list[Life]]):
    _, lives = disturbed
    ends = [lives[-1].seen(rank)[-1] for rank in range(RANKS)]
    assert [each["left"] for each in ends] == [{}] * RANKS, ends
    assert typical_seconds(lives[-1], slice(-40, None)) < 10 * typical_seconds(lives[0], slice(2, 10))
