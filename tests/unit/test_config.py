"""Settings that make no sense are refused with their name and value, as a ``ValueError`` and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

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
NAMES = [(config, field.name, field.type) for config in CONFIGS for field in fields(config)]
NUMBERS = [(config, name) for config, name, kind in NAMES if kind.startswith(("int", "float"))]


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize(
    "value", [NAN, "1", [1], object(), {"a": NAN}], ids=["nan", "text", "list", "object", "map"]
)
def test_a_value_that_is_not_a_number_is_a_value_error(config: type, name: str, value: object):
    with pytest.raises(ValueError, match=name):
        config(**{**CONFIGS[config], name: value})


@pytest.mark.parametrize(("config", "name"), [(config, name) for config, name, _ in NAMES], ids=str)
@pytest.mark.parametrize("value", [5.5, b"x", (None,), {1: 2}, complex(1, 1)], ids=repr)
def test_no_value_raises_anything_but_a_value_error(config: type, name: str, value: object):
    with suppress(ValueError):
        config(**{**CONFIGS[config], name: value})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (StragglerConfig, "confirmations"),
        (BaselineConfig, "warmup"),
        (ReplayConfig, "interval"),
        (ObserverConfig, "port"),
    ],
)
@pytest.mark.parametrize("value", [1.5, True])
def test_a_count_is_a_whole_number(config: type, name: str, value: object):
    with pytest.raises(ValueError, match=f"{name} must be a whole number, got {value}"):
        config(**{name: value})


def test_an_interval_of_one_recipe_is_a_whole_number_too():
    with pytest.raises(ValueError, match=r"an interval must be at least 1 step, got {'layer': nan}"):
        ReplayConfig(recipes={"layer": NAN})  # type: ignore[dict-item]


def test_only_known_ways_to_record_are_accepted():
    assert ReplayConfig(records="all").records == "all"
    with pytest.raises(ValueError, match="records must be one of summary, all, got 'some'"):
        ReplayConfig(records="some")


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    assert StragglerConfig(kappa=np.float32(4), confirmations=np.int64(3)).confirmations == 3


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
