"""What a user may ask of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchscout.config import CheckpointConfig


def test_a_folder_is_all_that_is_needed(tmp_path: Path):
    config = CheckpointConfig(tmp_path)
    assert (config.memory_budget, config.replicate, config.persist_every, config.keep_verified) == (
        None,
        True,
        10,
        1,
    )
    assert CheckpointConfig(str(tmp_path), memory_budget=1, persist_every=1, keep_verified=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"directory": ""}, "directory must name a folder, got ''"),
        ({"directory": None}, "directory must name a folder, got None"),
        ({"memory_budget": 0}, "memory_budget must be at least 1, got 0"),
        ({"memory_budget": 1.5}, r"memory_budget must be a whole number, got 1\.5"),
        ({"replicate": "no"}, "replicate must be True or False, got 'no'"),
        ({"persist_every": 0}, "persist_every must be at least 1, got 0"),
        ({"persist_every": True}, "persist_every must be a whole number, got True"),
        ({"checks_per_cycle": 0}, "checks_per_cycle must be at least 1, got 0"),
        ({"verify_on_resume": 1}, "verify_on_resume must be True or False, got 1"),
        ({"keep_verified": -1}, "keep_verified must be at least 0, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive and finite, got 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be"),
    ],
)
def test_nonsense_is_refused_with_its_value(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**{"directory": "d", **fields})
