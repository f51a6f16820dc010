"""Encodes one rank's state as bytes: a header, then the tensors (paper, section 9).

Pure functions on bytes, without torch, for files, shared memory and the network. Decoding trusts nothing:
every length, offset and shape is checked against the shard's size before anything is read or allocated, and
nothing is ever executed. Digests detect damage, not forgery.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from torchscout.checkpoint.gate import Generation, TrustLevel, is_number
from torchscout.errors import DamagedError
from torchscout.state.dtypes import ITEM_BYTES

__all__ = [
    "PREFIX_BYTES",
    "Blob",
    "Buffer",
    "Entry",
    "Header",
    "Outline",
    "ShardIdentity",
    "check_header",
    "check_padding",
    "decode",
    "digest",
    "encode",
    "parse",
    "probe",
]

# [Note: the layout of a shard]
#
#     prefix    8 bytes   magic
#               4 bytes   schema version, little endian
#               4 bytes   reserved, zero
#               8 bytes   length of the header in bytes
#              16 bytes   xxh3-128 of the 24 bytes before this and of the header
#     header              JSON, perhaps with spaces after it
#     tensors             each at the next multiple of 64 bytes, zeros between
#
# The shard ends with the last tensor. Offsets follow from the lengths; the header contains them for other
# readers, and they must match. So tensors cannot overlap, and every byte is covered by a digest or must be
# zero: every flipped bit is detected.
#
# A file in memory may be longer than its shard: see [Note: head room] in ``checkpoint.buffers``. So readers
# take the size of a shard from its header, and ignore what follows. Files on disk, and copies that are
# received, end with the shard.
MAGIC = b"SCOUT\x00\x1a\n"
SCHEMA = 2
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQ16s")
PREFIX_BYTES = _PREFIX.size
_DIGESTED = PREFIX_BYTES - 16

_MAX_DIMENSIONS = 64
_MAX_BYTES = 1 << 62
_NO_PROOF = ("0" * 32, "0" * 21)

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """Identifies the state in a shard."""

    job: str
    mesh: str
    """Describes how the ranks are laid out; different layouts have different descriptions."""
    world_size: int
    rank: int
    """The rank whose state this is, also in a copy that another rank holds."""
    generation: Generation

    def __post_init__(self) -> None:
        if not (isinstance(self.job, str) and isinstance(self.mesh, str)):
            raise ValueError(f"job and mesh must be strings, got {self.job!r:.40} and {self.mesh!r:.40}")
        if not (is_number(self.rank) and is_number(self.world_size) and self.rank < self.world_size):
            raise ValueError(f"rank must be below world_size, got {self.rank!r} and {self.world_size!r}")
        if not all(map(is_number, self.generation)):
            raise ValueError(f"a generation is a step and a lineage, got {self.generation}")

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "mesh": self.mesh,
            "world_size": self.world_size,
            "rank": self.rank,
            "generation": list(self.generation),
        }

    @classmethod
    def from_json(cls, document: Any) -> ShardIdentity:
        fields = _object(document, {"job", "mesh", "world_size", "rank", "generation"}, "identity")
        return cls(**{**fields, "generation": Generation.from_json(fields["generation"])})


@dataclass(frozen=True, slots=True)
class Blob:
    """One tensor's bytes, row-major; a ``memoryview`` must have format ``B``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    owner: object = None
    """The object that owns the memory, to keep it alive."""
    signature: str | None = None
    """See ``Entry.signature``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's position in a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the shard's first byte."""
    length: int
    digest: str
    """xxh3-128, 32 hex digits."""
    signature: str | None = None
    """``c3.signature.recorded`` of the tensor that was captured; None if it was not signed."""

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Header:
    """Everything in a shard except the tensors' bytes."""

    identity: ShardIdentity
    role: TrustLevel
    """The trust level when the shard was sealed; the gate's state has the current one."""
    document: Any
    """The state without its tensors, as ``state.encoding`` encodes it."""
    entries: tuple[Entry, ...]
    start: int
    """The offset of the header's end."""
    size: int
    """The size of the whole shard; its file may be longer."""


def digest(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Outline:
    """Where the tensors of a shard lie, behind a header that has up to ``room`` bytes.

    Tensors given by name, dtype and shape lie at the same offsets in every shard with the same ``room``.
    """

    def __init__(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]], room: int) -> None:
        if len({name for name, _, _ in tensors}) < len(tensors):
            raise ValueError("two tensors of a shard have the same name")
        # Offsets in the header count from its aligned end, so that its length does not change them.
        self._rows: list[dict[str, Any]] = []
        self.tensors = tensors
        self.room = room
        self.start = PREFIX_BYTES + room
        """The offset of the header's end."""
        self.places: list[int] = []
        """Each tensor's offset."""
        self.ends: list[int] = []
        end = first = _aligned(self.start)
        for name, dtype, shape in tensors:
            place, length = _aligned(end), _known_bytes_of(dtype, shape)
            row = {"name": name, "dtype": dtype, "shape": list(shape), "length": length}
            self._rows.append({**row, "offset": place - first})
            self.places.append(place)
            self.ends.append(end := place + length)
        self.size = self.ends[-1] if self.ends else self.start

    def header(
        self,
        identity: ShardIdentity,
        role: TrustLevel,
        document: Any,
        proofs: Sequence[tuple[str, str | None]] | None = None,
    ) -> bytes:
        """The header, given the tensors' digests and signatures. Without them it is no shorter."""
        proofs = [_NO_PROOF] * len(self._rows) if proofs is None else proofs
        rows = [
            {**row, "digest": digest, "signature": signature}
            for row, (digest, signature) in zip(self._rows, proofs, strict=True)
        ]
        fields = {"identity": identity.to_json(), "role": role.value, "tensors": rows, "document": document}
        return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    def head(self, header: bytes) -> bytes:
        """The bytes before the tensors: the prefix, the header, and spaces."""
        header = header.ljust(self.room)
        if len(header) > self.room:
            raise ValueError(f"the header has {len(header)} bytes, and there is room for {self.room}")
        prefix = _PREFIX.pack(MAGIC, SCHEMA, 0, len(header), b"")[:_DIGESTED]
        return prefix + xxhash.xxh3_128_digest(prefix + header) + header


def encode(identity: ShardIdentity, role: TrustLevel, document: Any, blobs: Sequence[Blob]) -> list[Buffer]:
    """The shard as consecutive pieces; tensors are not copied. Raises ``ValueError`` for wrong lengths."""
    for blob in blobs:
        if len(blob.data) != (expected := _bytes_of(blob.dtype, blob.shape)):
            raise ValueError(
                f"tensor {blob.name!r}, {blob.dtype} of shape {blob.shape}, has {expected} bytes, "
                f"not {len(blob.data)}"
            )
    tensors = [(blob.name, blob.dtype, blob.shape) for blob in blobs]
    proofs = [(digest(blob.data), blob.signature) for blob in blobs]
    header = Outline(tensors, 0).header(identity, role, document, proofs)
    outline = Outline(tensors, len(header))
    pieces: list[Buffer] = [outline.head(header)]
    position = len(pieces[0])
    for place, blob in zip(outline.places, blobs, strict=True):
        pieces += [bytes(place - position), blob.data]
        position = place + len(blob.data)
    return pieces


def probe(prefix: Buffer, size: int) -> int:
    """The number of bytes that ``parse`` needs, given the shard's first bytes and the size of its file."""
    if len(prefix) < PREFIX_BYTES or size < PREFIX_BYTES:
        raise DamagedError(f"not a shard: {size} bytes are too few")
    magic, schema, _, length, _ = _PREFIX.unpack(prefix[:PREFIX_BYTES])
    if magic != MAGIC:
        raise DamagedError(f"not a shard: it begins with {bytes(magic)!r}")
    if schema != SCHEMA:
        raise DamagedError(f"a shard of schema {schema}, this version reads {SCHEMA}")
    if length > size - PREFIX_BYTES:
        raise DamagedError(f"the header of {length} bytes does not fit a shard of {size}")
    return PREFIX_BYTES + int(length)


def check_header(prefix: Buffer, pieces: Iterable[Buffer], size: int) -> None:
    """Raise ``DamagedError`` unless these consecutive pieces are the header that was sealed.

    The header's length cannot be trusted before this check.
    """
    found = xxhash.xxh3_128(bytes(prefix[:_DIGESTED]))
    length = 0
    for piece in pieces:
        found.update(piece)
        length += len(piece)
    is_whole = length == probe(prefix, size) - PREFIX_BYTES
    if not is_whole or found.digest() != bytes(prefix[_DIGESTED:PREFIX_BYTES]):
        raise DamagedError("the header is damaged: its digest does not match")


def parse(start: Buffer, size: int) -> Header:
    """Parse the header from the first ``probe`` bytes of a file of ``size`` bytes.

    Raises ``DamagedError``, also if the file is shorter than the shard.
    """
    end = probe(start, size)
    view = memoryview(start)
    check_header(view, [view[PREFIX_BYTES:end]], size)
    header = bytes(view[PREFIX_BYTES:end])
    try:
        return _header(_json(header), end, size)
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(f"the header is not a shard's: {error}") from error


def decode(shard: Buffer) -> tuple[Header, dict[str, memoryview]]:
    """The header and a view of each tensor's bytes, all verified; raises ``DamagedError``."""
    view = memoryview(shard).cast("B")
    header = parse(view, len(view))
    check_padding(header, lambda offset, length: view[offset : offset + length])
    tensors = {entry.name: view[entry.offset : entry.end] for entry in header.entries}
    for entry in header.entries:
        if digest(tensors[entry.name]) != entry.digest:
            raise DamagedError(f"tensor {entry.name!r} is damaged: its digest does not match")
    return header, tensors


def check_padding(header: Header, read: Callable[[int, int], Buffer]) -> None:
    """Raise ``DamagedError`` unless all bytes between tensors are zero."""
    position = header.start
    for entry in header.entries:
        if any(read(position, entry.offset - position)):
            raise DamagedError(f"the bytes before tensor {entry.name!r} are damaged: they are not zero")
        position = entry.end


def _header(document: Any, start: int, size: int) -> Header:
    fields = _object(document, {"identity", "role", "tensors", "document"}, "header")
    identity = ShardIdentity.from_json(fields["identity"])
    if not isinstance(fields["tensors"], list):
        raise ValueError("tensors is not a list")
    entries = tuple(_entries(fields["tensors"], start))
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two tensors have the same name")
    end = entries[-1].end if entries else start
    if end > size:
        raise DamagedError(f"the shard has {end} bytes, and {size} of them are there")
    return Header(identity, TrustLevel(fields["role"]), fields["document"], entries, start, end)


_COLUMNS = {"name", "dtype", "shape", "length", "offset", "digest", "signature"}


def _entries(table: list[Any], start: int) -> Iterator[Entry]:
    first = end = _aligned(start)
    for row in table:
        fields = _object(row, _COLUMNS, "tensor")
        name, shape, value, signature = (fields[each] for each in ("name", "shape", "digest", "signature"))
        texts = (name, value, signature or "")
        if not isinstance(shape, list) or not all(isinstance(each, str) for each in texts):
            raise ValueError(f"not a tensor's description: {row!r:.80}")
        length = _bytes_of(fields["dtype"], shape)
        if not is_number(fields["length"]) or fields["length"] != length:
            raise ValueError(f"tensor {name!r:.80} has {length} bytes, not {fields['length']!r:.40}")
        if not is_number(fields["offset"]) or first + fields["offset"] != _aligned(end):
            raise ValueError(f"tensor {name!r:.80} does not lie at {fields['offset']!r:.40}")
        entry = Entry(name, fields["dtype"], tuple(shape), _aligned(end), length, value, signature)
        end = entry.end
        yield entry


def _bytes_of(dtype: Any, shape: Sequence[Any]) -> int:
    """The length of such a tensor in bytes; raises ``ValueError`` if no machine could hold it."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    if len(shape) > _MAX_DIMENSIONS or not all(map(is_number, shape)):
        raise ValueError(f"not the shape of a tensor: {shape!r:.80}")
    # Ignoring empty dimensions, because strides must not overflow either.
    if math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] > _MAX_BYTES:
        raise ValueError(f"a tensor of shape {shape!r:.80} is too large")
    return int(math.prod(shape)) * ITEM_BYTES[dtype]


_known_bytes_of = functools.lru_cache(4096)(_bytes_of)  # most tensors of a model have one of a few shapes


def _object(value: Any, keys: set[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != keys:
        raise ValueError(f"{what} must have {sorted(keys)}, got {value!r:.80}")
    return value


def _json(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
