"""Fingerprints are equal on all healthy callers of a collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.observer import publisher


class Reader:
    """Reads the fingerprint of every call."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def before(self, call: Call) -> None:
        self.read.append(publisher.read(call).text)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        pass


def reducing(rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[str]:
    """The first rank and the second give what has these shapes."""
    reader = Reader()
    with listen(reader):
        dist.all_reduce(torch.ones(shapes[rank]))
    return reader.read


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        pytest.param(((), (1,)), ("[1]", "[1]"), id="a number and a vector of one"),
        pytest.param(((2, 3), (3, 2)), ("[6]", "[6]"), id="other shapes of as many elements"),
    ],
)
def test_callers_share_what_has_as_many_elements(shapes: tuple[tuple[int, ...], ...], said: tuple[str, str]):
    assert run_ranks(reducing, 2, shapes) == [[f"all_reduce float32{each} sum"] for each in said]
