"""A rank's progress survives serialization."""

from __future__ import annotations

import json

import pytest

from torchscout.decision.progress import IssuedOp, Phase, Process, Progress, RankStatus

BARRIER = IssuedOp("world", 4, fingerprint=-5, digest=(1 << 62) + 1, text="barrier")
EXCHANGE = IssuedOp("expert", 1, 7, 8, "all_to_all float32", sends=(3, 0), receives=(1, 2))
PROGRESS = Progress(
    rank=3,
    step=12,
    operation=40,
    phase=Phase.CHECKPOINT_WRITE,
    issued={"world": 4, "expert": 1},
    recent=(BARRIER, EXCHANGE),
    at_communication=True,
    silent_seconds=6.25,
    device_step=11,
)


@pytest.mark.parametrize(
    "standing",
    [
        RankStatus(3, Process.RUNNING, PROGRESS, waiting=True, stack="File ..."),
        RankStatus(0, Process.GONE, None),
    ],
)
def test_progress_survives_json(standing: RankStatus):
    assert RankStatus.from_json(json.loads(json.dumps(standing.to_json()))) == standing


def test_a_coordinate_is_step_and_operation():
    assert PROGRESS.coordinate == (12, 40)
