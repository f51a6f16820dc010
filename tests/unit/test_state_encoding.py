"""State as JSON and tensors: everything in state dicts round-trips, and nothing else is accepted."""

from __future__ import annotations

import functools
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.encoding import decode, encode


class Position(NamedTuple):
    epoch: int
    offset: int


class Color(IntEnum):
    RED = 1


def round_trip(tree: Any) -> Any:
    document, tensors = encode(tree)
    return decode(json.loads(json.dumps(document, allow_nan=False)), tensors)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        0,
        -(2**53),
        2**200,
        -(2**63),
        0.1,
        5e-324,
        "text \ud800 \0",
        b"",
        b"\x00\xff",
        1 - 2j,
        [],
        (),
        ((), [[]], {}),
        {1: "a", "1": "b", (1, 2): "c", None: "d", 2.5: "e", False: "f", b"k": "g"},
        {"tensor": 1, "dict": {"int": "0x1"}},
        OrderedDict(b=1, a=2),
        Counter({30: 1, 60: 2}),
        {1, 2},
        torch.float8_e4m3fn,
        torch.device("cuda", 3),
        torch.device("cpu"),
        torch.Size([2, 0, 3]),
        random.Random(1).getstate(),
        np.random.PCG64(5).state,
        deque([1, (2, "b")], maxlen=4),
        deque(),
    ],
    ids=lambda tree: repr(tree)[:30],
)
def test_values_that_state_consists_of_round_trip(tree: Any):
    found = round_trip(tree)
    assert (found, type(found)) == (tree, type(tree))
    assert getattr(found, "maxlen", None) == getattr(tree, "maxlen", None)
    if isinstance(tree, dict):
        assert list(map(type, found)) == list(map(type, tree))
        assert list(found) == list(tree), "in order"


def test_floats_keep_their_bits():
    odd = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf4\x7f")[0]  # a signalling NaN with a payload
    for value in (math.inf, -math.inf, -0.0, math.nan, -math.nan, odd, 1 / 3):
        assert bits(round_trip(value)) == bits(value)
        assert bits(round_trip(complex(0, value)).imag) == bits(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(10)[::3],
        np.zeros((0, 4), "f4"),
        np.array(3.5),
        np.array([1, 2], ">u4"),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_arrays_come_back(array: np.ndarray):
    found = round_trip({"a": array})["a"]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [np.float64(0.1), np.float32(0.1), np.float16("-0.0"), np.int64(-5), np.bool_(True), np.complex64(1j)],
)
def test_numpy_scalars_come_back(scalar: np.generic):
    found = round_trip(scalar)
    assert (found.tobytes(), type(found), found.dtype) == (scalar.tobytes(), type(scalar), scalar.dtype)


def test_equal_sets_are_encoded_alike():
    """Resharding compares the documents of ranks, whose processes order strings differently."""
    assert encode({8, 0}) == encode({0, 8})
    assert list({8, 0}) != list({0, 8}), "the order of a set depends on its history too"


def test_tensors_are_named_by_where_they_are_and_not_copied():
    weight, step = torch.randn(2, 3), torch.tensor(4)
    tree = {"model": OrderedDict(weight=weight), "state": {0: {"step": step}}, "tied": [weight]}
    document, tensors = encode(tree)
    assert list(tensors) == ["model/weight", "state/0/step"]
    assert tensors["model/weight"] is weight
    found = decode(document, tensors)
    assert found["tied"][0] is found["model"]["weight"] is weight


def test_places_that_read_alike_have_names_of_their_own():
    tree = {1: torch.ones(1), "1": torch.ones(2), "a/b": torch.ones(3), "a": {"b": torch.ones(4)}}
    assert [len(each) for each in encode(tree).tensors.values()] == [1, 2, 3, 4]
    found = round_trip(tree)
    assert (len(found[1]), len(found["1"]), len(found["a/b"]), len(found["a"]["b"])) == (1, 2, 3, 4)


def test_what_optimizers_schedulers_and_generators_call_their_state_comes_back():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    schedule.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, np.cos)  # which makes learning rates NumPy's
    assert type(optimizer.param_groups[0]["lr"]) is np.float64
    tree = [optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state(), np.random.get_state()]
    found = round_trip(tree)
    assert repr(found) == repr(tree)
    optimizer.load_state_dict(found[0])
    schedule.load_state_dict(found[1])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, object()]}, "a/1 is a builtins.object, which a checkpoint cannot store"),
        ({"fn": functools.partial(print)}, "fn is a functools.partial"),
        (
            {"d": defaultdict(int)},
            "d is a collections.defaultdict, which .* store the numbers, strings, lists",
        ),
        ({"c": [Color.RED]}, r"c/0 is a tests.unit.test_state_encoding.Color, which"),
        ({"p": Position(1, 2)}, r"p is a tests.unit.test_state_encoding.Position, which"),
        ({"f": Path("/data")}, r"f is a pathlib\.\S*Path, which"),
        ({"s": {"a": np.str_("b")}}, r"s/a is a numpy\.str_, which"),
        ({"t": np.timedelta64(1, "D")}, r"t has NumPy's type <m8\[D\], which"),
        ({"q": deque([1, {"b": object()}])}, "q/1/b is a builtins.object"),
        (
            {"o": np.array([object()])},
            r"o has NumPy's type \|O, which a checkpoint cannot store; use one of numbers",
        ),
        ({"s": np.zeros(2, [("a", "f4")])}, "s has NumPy's type |V4, which"),
        ({"w": np.array(["a"])}, "w has NumPy's type <U1, which"),
        ({"m": torch.empty(2, device="meta")}, "m is a meta tensor, which has no bytes"),
        ({"s": torch.eye(2).to_sparse()}, "s is a torch.sparse_coo tensor"),
        (torch.return_types.max((1, 2)), "the state is a torch.return_types.max"),
    ],
)
def test_other_values_are_refused_with_their_path(tree: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        encode(tree)


def test_subclasses_of_tensors_are_the_callers_to_take_apart():
    class Wrapped(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="w is a Wrapped, which does not hold its own data"):
        encode({"w": torch.ones(2).as_subclass(Wrapped)})


def nested(levels: int) -> Any:
    return functools.reduce(lambda tree, _: {"a": tree}, range(levels), 1)


def test_a_hundred_levels_come_back_and_containers_that_are_deeper_or_recursive_are_refused():
    assert round_trip(nested(100)) == nested(100)
    loop: list[Any] = []
    loop.append(loop)
    for tree in (loop, nested(101)):
        with pytest.raises(CheckpointError, match="contains itself, or is nested more than 100"):
            encode(tree)


@pytest.mark.parametrize(
    "document",
    [
        {"unknown": 1},
        {"int": "0x1", "float": "0"},
        {},
        {"int": 5},
        {"int": "zz"},
        {"float": "00"},
        {"float": 1},
        {"complex": [1, 2]},
        {"complex": "00"},
        {"bytes": "***"},
        {"dtype": "nn"},
        {"dtype": ["float32"]},
        {"device": "rocket:1"},
        {"device": "../x"},
        {"size": [-1, "a"]},
        {"tuple": {"tuple": 1}},
        {"set": [[1]]},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"dict": ["ab"]},
        {"dict": [["a", 1, 2]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"tensor": "nowhere"},
        {"tensor": ["t"]},
        {"array": ["|O", [1], "t"]},
        {"array": ["<f4", [2], "t"]},
        {"array": ["<f4", [-1, -1], "t"]},
        {"array": ["<f4", 1, "t"]},
        {"array": ["<f4", [1.0], "t"]},
        {"array": ["|u1", ["a", 1 << 40], "t"]},
        {"array": ["|u1", [0, 1 << 70], "e"]},
        {"array": ["<f4", [1], "f"]},
        {"array": ["f4,f4", [1], "t"]},
        {"array": ["<f4", [1]]},
        {"scalar": ["<f4", "0000"]},
        {"scalar": ["|O", "0000000000000000"]},
        {"scalar": ["<f4", "0000000000000000"]},
        {"scalar": ["<f4", 1]},
        {"scalar": "<f"},
        functools.reduce(lambda inner, _: [inner], range(200), 1),
        {"deque": [1]},
        {"deque": ["2", []]},
        {"deque": [-1, []]},
    ],
    ids=lambda document: json.dumps(document)[:40],
)
def test_a_hostile_document_is_refused(document: Any):
    tensors = {
        "t": torch.zeros(4, dtype=torch.uint8),
        "e": torch.zeros(0, dtype=torch.uint8),
        "f": torch.zeros(1),
    }
    with pytest.raises(DamagedError, match="not the state of a checkpoint"):
        decode(document, tensors)
    with pytest.raises(DamagedError, match="not the state of a checkpoint: a/1"):
        decode({"dict": [["a", [0, document]]]}, tensors)
