"""A shard's bytes: they round-trip, any changed bit is found, and hostile headers cost nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from tests.support.states import blob_of
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, decode, encode, parse
from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.dtypes import ITEM_BYTES
from torchscout.state.layout import bytes_of, dtype_named, empty_tensor

IDENTITY = ShardIdentity(
    job="job", mesh="replica=2 shard=2", world_size=4, rank=3, generation=Generation(7, 1)
)
BLOBS = [
    Blob("weight", "float32", (2, 3), bytes(range(24))),
    Blob("empty", "int64", (0, 5), b""),
    Blob("flag", "bool", (), b"\x01"),
]


def shard_of(blobs: list[Blob] = BLOBS, document: Any = None) -> bytes:
    return b"".join(encode(IDENTITY, TrustLevel.CANDIDATE, document, blobs))


def forged(header: bytes | dict[str, Any]) -> bytes:
    """The shard with another header, whose digest is right."""
    whole = shard_of()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = whole[:16] + struct.pack("<Q", len(text))
    tensors = whole[-(-(40 + len(header_of(whole))) // 64) * 64 :]
    padding = bytes(-(40 + len(text)) % 64)
    return prefix + xxhash.xxh3_128_digest(prefix + text) + text + padding + tensors


def header_of(whole: bytes) -> bytes:
    return whole[40 : 40 + struct.unpack_from("<Q", whole, 16)[0]]


def test_encoding_and_decoding_round_trip():
    header, tensors = decode(shard_of(document={"a": [1, None]}))
    assert header.identity == IDENTITY
    assert header.role is TrustLevel.CANDIDATE
    assert header.document == {"a": [1, None]}
    assert {name: bytes(data) for name, data in tensors.items()} == {b.name: b.data for b in BLOBS}
    assert [(e.name, e.dtype, e.shape) for e in header.entries] == [(b.name, b.dtype, b.shape) for b in BLOBS]


def test_tensors_are_aligned_for_any_device():
    header, _ = decode(shard_of())
    assert all(entry.offset % 64 == 0 for entry in header.entries)


def test_a_shard_may_hold_no_tensor():
    assert decode(shard_of([]))[1] == {}


def read_again(tensor: torch.Tensor) -> torch.Tensor:
    header, data = decode(shard_of([blob_of("t", tensor)]))
    (entry,) = header.entries
    room = empty_tensor(entry.dtype, entry.shape)
    bytes_of(room)[:] = data["t"]
    return room


def test_every_dtype_keeps_its_bits():
    """All patterns there are of one or two bytes, NaNs of every payload among them."""
    raw = torch.arange(65536, dtype=torch.int32).to(torch.uint16).repeat(4).view(torch.uint8)
    for name in sorted(ITEM_BYTES):
        tensor = raw.view(dtype_named(name)) if name != "bool" else (raw > 127)
        assert tensor.dtype.itemsize == ITEM_BYTES[name]
        found = read_again(tensor)
        assert found.dtype is tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


LAYOUTS = [
    torch.tensor(3.5),
    torch.tensor(True),
    torch.empty(0),
    torch.empty(3, 0, 2),
    torch.arange(12).view(3, 4).T,
    torch.arange(12)[::5],
    torch.ones(1, dtype=torch.bfloat16).expand(4, 3),
    torch.randn(2, 3, dtype=torch.complex64).conj(),
    torch.randn(2, dtype=torch.complex64).conj().imag,
    torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.nn.Parameter(torch.randn(3)),
]


def test_tensors_of_every_layout_come_back():
    for tensor in LAYOUTS:
        found = read_again(tensor)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found, tensor.detach())


def test_every_flipped_bit_and_every_truncation_is_seen():
    whole = shard_of(document="x")
    decode(whole)
    flipped = (bytes([whole[each // 8] ^ 1 << each % 8]) for each in range(len(whole) * 8))
    changed = [whole[: each // 8] + byte + whole[each // 8 + 1 :] for each, byte in enumerate(flipped)]
    changed += [whole[:size] for size in range(len(whole))]
    for each in changed:
        with pytest.raises(DamagedError):
            decode(each)


@pytest.mark.parametrize("more", [1, 64, 1 << 20])
def test_a_file_may_be_longer_than_its_shard(more: int):
    """Snapshots in memory have head room, and an older one may have left anything there."""
    whole = shard_of()
    header, tensors = decode(whole + b"\xff" * more)
    assert header.size == len(whole)
    assert tensors == decode(whole)[1]


def test_a_damaged_tensor_is_named():
    changed = bytearray(shard_of())
    header, _ = decode(changed)
    changed[header.entries[0].offset + 5] ^= 1
    with pytest.raises(DamagedError, match="tensor 'weight' is damaged"):
        decode(changed)


def row(index: int, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    """A header with one tensor described otherwise."""

    def changed(header: dict[str, Any]) -> dict[str, Any]:
        header["tensors"][index].update(fields)
        return header

    return changed


def identity(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: {**header, "identity": {**header["identity"], **fields}}


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge length": row(0, length=2**62),
    "huge shape": row(0, shape=[2**62], length=2**64),
    "overflowing shape": row(0, shape=[2**32, 2**32], length=0),
    "overflowing strides": row(1, shape=[0, 2**40, 2**40], length=0),
    "negative length": row(0, length=-24),
    "negative shape": row(0, shape=[-2, -3]),
    "true for one": row(2, shape=[True]),
    "fractions": row(0, shape=[2.0, 3.0]),
    "too many dimensions": row(2, shape=[1] * 65),
    "shape and length differ": row(0, shape=[2, 2]),
    "dtype and length differ": row(0, dtype="float64"),
    "no such dtype": row(0, dtype="object"),
    "dtype of another kind": row(0, dtype=["float32"]),
    "beyond the end": row(2, offset=2**40),
    "negative offset": row(0, offset=-64),
    "overlap": row(2, offset=0),
    "a gap": row(2, offset=128),
    "an odd offset": row(2, offset=32),
    "no digest": row(0, digest=None),
    "a name that is none": row(0, name=5),
    "the same name twice": row(2, name="weight"),
    "an unknown field": row(0, extra=1),
    "a missing field": lambda header: {**header, "tensors": [{"name": "weight"}]},
    "tensors of another kind": lambda header: {**header, "tensors": {}},
    "a row of another kind": lambda header: {**header, "tensors": [5]},
    "no such role": lambda header: {**header, "role": "boss"},
    "role of another kind": lambda header: {**header, "role": []},
    "identity of another kind": lambda header: {**header, "identity": []},
    "no such rank": identity(rank=4),
    "job of another kind": identity(job=1),
    "generation of another kind": identity(generation=[1, -1]),
    "a list": lambda header: [header],
    "not a number": lambda header: {**header, "document": float("nan")},
    "a key twice": lambda header: json.dumps(header).replace('"role"', '"role": 1, "role"').encode(),
}
RAW = {"not JSON": b"{", "not text": b"\xff\xfe", "bottomless": b"[" * 100_000, "endless": b"9" * 10_000}


def refused(header: bytes | dict[str, Any]) -> str:
    with pytest.raises(DamagedError) as caught:
        decode(forged(header))
    return str(caught.value)


def test_a_forged_shard_without_changes_is_identical():
    assert forged(header_of(shard_of())) == shard_of()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(case: str):
    assert "does not match" not in refused(HOSTILE[case](json.loads(header_of(shard_of())))), case


@pytest.mark.parametrize("case", RAW)
def test_a_header_that_is_not_json_is_refused(case: str):
    assert "not a shard's" in refused(RAW[case])


def test_a_header_that_claims_more_than_there_is_costs_no_memory():
    """Nothing but the claimed size is looked at."""
    whole = shard_of()
    prefix = whole[:16] + struct.pack("<Q", 2**60) + whole[24:40]
    with pytest.raises(DamagedError, match="does not fit"):
        parse(prefix, len(prefix))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:39], "too few"),
        (lambda s: b"PK" + s[2:], "not a shard: it begins with"),
        (lambda s: s[:8] + b"\x09" + s[9:], "schema 9, this version reads 2"),
        (lambda s: s[:50] + b"?" + s[51:], "the header is damaged"),
    ],
)
def test_a_damaged_shard_is_described(change: Callable[[bytes], bytes], message: str):
    with pytest.raises(DamagedError, match=message) as caught:
        decode(change(shard_of()))
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        ([BLOBS[0], BLOBS[0]], "same name"),
        ([Blob("t", "float32", (3,), b"1234")], "has 12 bytes, not 4"),
        ([Blob("t", "str", (1,), b"1")], "unknown dtype 'str'"),
    ],
)
def test_a_wrong_tensor_is_refused_before_anything_is_written(blobs: list[Blob], message: str):
    with pytest.raises(ValueError, match=message):
        shard_of(blobs)


@pytest.mark.parametrize("fields", [{"rank": 4}, {"rank": -1}, {"job": None}, {"generation": Generation(-1)}])
def test_an_impossible_identity_is_refused(fields: dict[str, Any]):
    document = {**IDENTITY.to_json(), "generation": IDENTITY.generation, **fields}
    with pytest.raises(ValueError, match=r"rank must be below|must be strings|a step"):
        ShardIdentity(**document)
