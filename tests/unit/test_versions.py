"""Which releases of frameworks are known, by their numbers alone."""

from __future__ import annotations

import pytest

from torchscout.adapters.versions import unknown


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("deepspeed", "0.19.8"),
        ("deepspeed", "0.19.0+cu128"),
        ("transformers", "5.30.1"),
        ("torchtitan", "0.0.0"),
    ],
)
def test_a_release_of_the_tested_series_is_known(distribution: str, version: str):
    assert unknown(distribution, version) is None


@pytest.mark.parametrize(
    ("distribution", "version", "series"),
    [("deepspeed", "0.18.9", "0.19"), ("megatron-core", "0.160.1", "0.16"), ("transformers", "4.57", "5")],
)
def test_any_other_release_is_one_sentence(distribution: str, version: str, series: str):
    assert (
        unknown(distribution, version)
        == f"{distribution} {version} is not supported; torchscout supports {series}"
    )
