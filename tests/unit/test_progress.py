"""What observers report: windows, where a rank is, how it ended, and that progress survives serialization."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from torchscout.decision.progress import How, IssuedOp, Phase, Progress, RankReport, Window

RECENT = Window(
    [
        IssuedOp("expert", 1, 7, 8, "all_to_all float32", sends=(3, 0), receives=(1, 2)),
        IssuedOp("world", 3, 5, 6, "barrier"),
        IssuedOp("world", 4, fingerprint=5, digest=(1 << 62) + 1, text="barrier"),
    ]
)
PROGRESS = Progress(
    rank=3,
    step=12,
    operation=40,
    phase=Phase.CHECKPOINT_WRITE,
    issued={"world": 4, "expert": 1},
    recent=RECENT,
    at_communication=True,
    silent_seconds=6.25,
    device_step=11,
)


def test_progress_survives_json():
    assert Progress.from_json(json.loads(json.dumps(PROGRESS.to_json()))) == PROGRESS


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": 1 << 63},
        {"issued": {"world": 0.5}},
        {"entered": {"world": None}},
        {"phase": "sleep"},
        {"silent_seconds": "6"},
        {"recent": [{**PROGRESS.to_json()["recent"][0], "number": "1"}]},
        {"recent": [{**PROGRESS.to_json()["recent"][0], "sends": [1 << 63]}]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_other_types_are_refused(change: dict[str, Any]):
    with pytest.raises((LookupError, TypeError, ValueError)):
        Progress.from_json({**PROGRESS.to_json(), **change})


def test_a_coordinate_is_step_and_operation():
    assert PROGRESS.coordinate == (12, 40)


def test_a_window_knows_the_last_operation_of_each_group():
    assert RECENT.newest == ("world", 4)
    assert RECENT.digests == {"expert": 8, "world": (1 << 62) + 1}
    assert RECENT.last_numbers == {"expert": 1, "world": 4}
    assert [RECENT.has_splits(group) for group in ("expert", "world")] == [True, False]
    assert [each.number for each in RECENT.of("world")] == [3, 4]
    assert Window().newest is None


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({}, ("world", 4)),
        ({"at_communication": False}, None),
        ({"recent": Window()}, None),
        # Where devices enter operations, the device decides as long as it is busy.
        ({"entered": {"world": 3}, "device_busy": True}, ("world", 3)),
        ({"entered": {"world": 3, "expert": 1}, "device_busy": True}, ("world", 3)),
        ({"entered": {"world": 2, "expert": 1}, "device_busy": True}, ("expert", 1)),
        ({"entered": {"world": 3}, "device_busy": None}, ("world", 3)),
        ({"entered": {"world": 4}, "device_busy": None}, None),
        ({"entered": {"world": 4}, "device_busy": False}, None),
        ({"entered": {"expert": 1}, "device_busy": False}, ("world", 4)),
    ],
    ids=str,
)
def test_the_operation_that_a_rank_seems_to_be_in(changes: dict[str, Any], inside: tuple[str, int] | None):
    assert replace(PROGRESS, **changes).inside == inside


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("killed", 9, "was killed by SIGKILL"),
        ("failed", 11, "was ended by SIGSEGV"),
        ("failed", 60, "was ended by signal 60"),
        ("asked", 15, "was ended by SIGTERM"),
        ("failed", 1 << 8, "failed with exit status 1"),
        ("failed", 0, "ended with exit status 0"),
        ("failed", None, "failed"),
        ("asked", None, "was terminated"),
        ("unknown", None, "has ended, it is not known how"),
        (None, None, "has ended, it is not known how"),
    ],
)
def test_how_a_process_ended_in_words(how: How | None, status: int | None, words: str):
    assert RankReport(0, how=how, wait_status=status).ended == words
