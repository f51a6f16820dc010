"""Settings that make no sense are refused with their name and value, as a ``ValueError`` and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchscout.config import (
    BaselineConfig,
    CheckpointConfig,
    ObserverConfig,
    Parallelism,
    ReplayConfig,
    StragglerConfig,
)

NAN = float("nan")
CONFIGS: dict[type, dict[str, Any]] = {
    StragglerConfig: {},
    BaselineConfig: {},
    ReplayConfig: {},
    ObserverConfig: {},
    Parallelism: {},
    CheckpointConfig: {"directory": "d"},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_value_of_another_type_is_a_value_error_and_nothing_else(config: type):
    for field in fields(config):
        if field.type.startswith(("int", "float")):
            for value in (NAN, "1", [1], object(), {"a": NAN}):
                with pytest.raises(ValueError, match=field.name):
                    config(**{**CONFIGS[config], field.name: value})
        for value in (5.5, b"x", (None,), {1: 2}, complex(1, 1)):
            with suppress(ValueError):
                config(**{**CONFIGS[config], field.name: value})


@pytest.mark.parametrize(
    ("config", "name", "value", "message"),
    [
        (StragglerConfig, "confirmations", 1.5, "whole number"),
        (BaselineConfig, "warmup", True, "whole number"),
        (ReplayConfig, "interval", 1.5, "whole number"),
        (ReplayConfig, "recipes", {"layer": NAN}, "at least 1"),
        (ReplayConfig, "records", "some", "summary, all"),
        (ObserverConfig, "port", True, "whole number"),
        (CheckpointConfig, "directory", "", "folder"),
        (CheckpointConfig, "directory", None, "folder"),
        (CheckpointConfig, "job", "../x", "letters"),
        (CheckpointConfig, "job", "x" * 129, "letters"),
        (CheckpointConfig, "memory_budget", 0, "at least 1"),
        (CheckpointConfig, "replicate", "no", "True or False"),
        (CheckpointConfig, "directory", " ", "name a folder"),
        (CheckpointConfig, "directory", "a\0b", "name a folder"),
        (CheckpointConfig, "persist_every", 0, "at least 1"),
        (CheckpointConfig, "persist_every", True, "whole number"),
        (CheckpointConfig, "checks_per_cycle", 0, "at least 1"),
        (CheckpointConfig, "verify_on_resume", 1, "True or False"),
        (CheckpointConfig, "keep_verified", -1, "at least 0"),
        (CheckpointConfig, "timeout_seconds", 0, "positive"),
        (CheckpointConfig, "timeout_seconds", float("inf"), "finite"),
    ],
)
def test_nonsense_is_refused_with_what_is_right_and_its_value(
    config: type, name: str, value: object, message: str
):
    with pytest.raises(ValueError, match=message) as caught:
        config(**{**CONFIGS[config], name: value})
    if name != "recipes":
        assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    assert StragglerConfig(kappa=np.float32(4), confirmations=np.int64(3)).confirmations == 3


def test_a_folder_is_all_that_is_needed(tmp_path: Path):
    config = CheckpointConfig(tmp_path)
    assert (config.memory_budget, config.replicate, config.persist_every) == (None, True, 10)
    assert CheckpointConfig(str(tmp_path), memory_budget=1, persist_every=1, keep_verified=0)
