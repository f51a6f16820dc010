"""Settings that make no sense are refused with their name and value, as a ``ValueError`` and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
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
