"""A rank's state under every layout: real ranks are interrupted and go on bitwise, or are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.state_jobs import (
    after_an_evaluation,
    captured_while_training,
    crash_and_resume,
    refused,
    registered_parts,
)

LAYOUTS = [
    ("ddp", (2,)),
    ("zero", (2,)),
    ("fsdp2", (2,)),
    ("fsdp2", (3,)),
    ("hsdp", (2, 2)),
    ("tp", (2,)),
    ("fsdp2+tp", (2, 2)),
]
BEGINNING = ("ddp", "fsdp2")
"""Which are interrupted before their first step in ordinary runs, too."""


@pytest.mark.parametrize(
    ("kind", "shape", "at"),
    [
        pytest.param(*layout, at, marks=pytest.mark.slow if at == 0 and layout[0] not in BEGINNING else ())
        for at in (0, 2)
        for layout in LAYOUTS
    ],
)
def test_interrupted_ranks_are_bitwise_the_uninterrupted_ones(kind: str, shape: tuple[int, ...], at: int):
    for same, same_streams, count in run_ranks(crash_and_resume, math.prod(shape), kind, shape, at):
        assert same
        assert same_streams
        assert count > 18, "parameters and groups at least"


@pytest.mark.parametrize(("kind", "shape"), [("ddp", (2,)), ("fsdp2", (2,)), ("fsdp2+tp", (2, 2))])
def test_what_is_captured_while_ranks_train_on_is_the_state_of_one_step(
    kind: str, shape: tuple[int, ...], tmp_path: Path
):
    for outcomes in run_ranks(captured_while_training, math.prod(shape), kind, shape, tmp_path):
        assert outcomes == [(None, True)] * 4


@pytest.mark.parametrize(
    ("kept", "here", "expected"),
    [
        (("ddp", ()), ("fsdp2", (2,)), "'module.tokens.weight' is in the checkpoint but not in this job"),
        (("tp", (2,)), ("fsdp2", (2,)), "stack.0.up.weight' .*is on a mesh with axes"),
        (("fsdp2", (2,)), ("tp", (2,)), "'tokens.weight' has shape .24, 16., had .12, 16."),
    ],
)
def test_another_layout_is_refused_and_nothing_changes(kept, here, expected: str):
    for message, unchanged in run_ranks(refused, 2, kept, here):
        assert unchanged
        assert message.startswith("the checkpoint does not fit this job: ")
        assert re.search(expected, message), message


def test_hsdp_of_another_mesh_is_refused():
    for message, unchanged in run_ranks(refused, 4, ("hsdp", (2, 2)), ("hsdp", (4, 1))):
        assert unchanged
        assert "has shape" in message or "is on a mesh of [4, 1], was [2, 2]" in message


def test_gathered_parameters_are_neither_kept_nor_left_stale():
    assert run_ranks(after_an_evaluation, 2) == [True, True]


def test_registered_parts_of_distributed_tensors_come_back_where_they_were():
    for same, message in run_ranks(registered_parts, 2):
        assert same
        assert "does not fit this job" in message
