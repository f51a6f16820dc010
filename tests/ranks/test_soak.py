"""A healthy job of many steps with observer, replay, checkpoints and permission to restart and replace:
nothing is reported, nothing is done, and nothing grows.

``SCOUT_SOAK`` names another number of steps; ``make soak`` has twenty thousand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.soaking_job import INTERVAL, PARTS, Part, Soaked, sizes_in, train
from torchscout.decision.records.record import Agreements
from torchscout.decision.records.recorder import Stamped, read
from torchscout.decision.recovery.restart_plan import RestartPlan

STEPS = int(os.environ.get("SCOUT_SOAK", "2000"))
RANKS = 3
WARM = PARTS // 5
"""The first parts are not looked at: buffers, pools and histories fill."""
MOST_KIB = 6 << 10
"""More resident memory is growth; an allocator alone moves it by a mebibyte or two."""
MOST_SLOWER = 1.5
MOST_BYTES = 1 << 20
"""Of any file in the run directory."""

pytestmark = pytest.mark.slow


def grown(parts: Sequence[Part]) -> set[str]:
    """What the last part has more of than the first one that is warm."""
    first, last = parts[WARM], parts[-1]
    found = set()
    for before, after in ((first.trainer, last.trainer), (first.observer, last.observer)):
        found |= {"descriptors"} if after.descriptors > before.descriptors else set()
        found |= {"threads"} if after.threads > before.threads else set()
        found |= {"resident"} if after.resident > before.resident + MOST_KIB else set()
    found |= {"step time"} if last.cpu_ms > MOST_SLOWER * first.cpu_ms else set()
    return found | ({"checkpoints"} if last.checkpoints > 1.5 * first.checkpoints else set())


def compared(path: Path) -> int:
    """How often parameters were, by the counts that were written down."""
    lines = [each.item for each in read(path) if isinstance(each, Stamped)]
    surfaces = [each for line in lines if isinstance(line, Agreements) for each in line.surfaces]
    return sum(each.count for each in surfaces if each.surface == "state/parameters")


def shown(found: Sequence[Soaked], folder: Path) -> str:
    """The figures, for a person."""
    rows = ["rank part  trainer KiB/fds/threads  observer KiB/fds/threads  step ms  CPU ms  checkpoint bytes"]
    for rank, each in enumerate(found):
        for number, part in enumerate(each.parts):
            held = [
                f"{one.resident} {one.descriptors} {one.threads}" for one in (part.trainer, part.observer)
            ]
            times = f"{part.step_ms:.2f}  {part.cpu_ms:.2f}"
            rows.append(f"{rank} {number}  {'  '.join(held)}  {times}  {part.checkpoints}")
    sizes = sizes_in(folder / "run")
    return "\n".join([*rows, *(f"{size} {name}" for name, size in sorted(sizes.items()))])


def test_a_healthy_job_reports_nothing_and_does_not_grow(tmp_path: Path):
    found = run_ranks(train, RANKS, tmp_path, STEPS, timeout=120 + 0.5 * STEPS)
    print(shown(found, tmp_path))
    for rank, each in enumerate(found):
        assert (each.incidents, each.failures) == ([], [])
        assert each.status["replay"]["checks"] == STEPS // INTERVAL
        assert each.status["replay"]["certified"] == STEPS // INTERVAL * INTERVAL
        assert each.status["checkpoint"]["verified"] is not None
        assert each.status["checkpoint"]["problems"] == []
        assert each.status["observer"]["restarts"] == 0
        assert grown(each.parts) == set()
        assert compared(tmp_path / "run" / "records" / f"rank-{rank}.jsonl") == STEPS // INTERVAL
    sizes = sizes_in(tmp_path / "run")
    assert "incidents.jsonl" not in sizes, "no incident, and nothing was decided"
    assert not RestartPlan.path(tmp_path / "files").exists()
    assert max(sizes.values()) < MOST_BYTES, sizes


@pytest.mark.parametrize("leak", ["descriptors", "threads", "resident"])
def test_a_memory_leak_is_detected(tmp_path: Path, leak: str):
    found = run_ranks(train, 2, tmp_path, 200, leak, timeout=300)
    assert leak not in grown(found[0].parts)
    assert leak in grown(found[1].parts)
