"""Encodes nested state as a JSON document and tensors, and decodes it (paper, section 9).

Only the types in ``_ROWS`` are supported. Others are refused with their place and type, because restoring
them would mean running code that a file names. Numbers keep their exact bits, including those of NaNs.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.layout import bytes_of, dtype_named, empty_tensor, name_of, why_not_bytes

__all__ = ["Encoded", "decode", "encode"]

# [Note: tagged JSON]
#
# null, booleans, strings, lists and numbers that JSON represents exactly are stored as they are. Everything
# else is an object with one key, a tag that says how to read its value: see ``_ROWS``. So is a dict, so that
# keys of any type and their order are preserved, and no user's key can be mistaken for a tag.

_DEPTH = 100
_EXACT = 1 << 53
_DOUBLE, _PAIR = struct.Struct(">d"), struct.Struct(">dd")
_NUMBERS = re.compile(r"[<>|][biufc]\d{1,2}")
"""NumPy's types of numbers."""


class Encoded(NamedTuple):
    document: Any
    """For ``json.dumps``."""
    tensors: dict[str, torch.Tensor]
    """By the name that the document refers to: the path in the tree where the tensor was found first."""


def encode(tree: Any, names: Mapping[int, str] = MappingProxyType({})) -> Encoded:
    """Split a tree. Raises ``CheckpointError`` with the path and type of an unsupported value.

    ``names`` has the names of some tensors, by their ``id``; any other is named after its path.
    """
    encoder = _Encoder(names)
    try:
        return Encoded(encoder.value(tree), encoder.tensors)
    except ValueError as error:
        raise CheckpointError(f"{encoder.place} {error}") from error


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Restore a tree. Raises ``DamagedError``, with the path, if this is not an encoded tree."""
    decoder = _Decoder(tensors)
    try:
        return decoder.value(document)
    except (ValueError, TypeError, OverflowError, struct.error, RuntimeError) as error:
        raise DamagedError(f"not the state of a checkpoint: {decoder.place}: {error}") from error


class _Walk(ABC):
    """Goes through a tree. Methods raise ``ValueError`` for what is wrong at ``path``."""

    def __init__(self) -> None:
        self.path: list[str] = []

    @property
    def place(self) -> str:
        return "/".join(self.path) or "the state"

    @abstractmethod
    def value(self, value: Any) -> Any:
        """Encode or decode what lies at ``path``."""

    def at(self, name: str, value: Any) -> Any:
        """Encode or decode what lies under this name."""
        self.path.append(name)
        if len(self.path) > _DEPTH:
            raise ValueError(f"contains itself, or is nested more than {_DEPTH} deep")
        done = self.value(value)
        self.path.pop()
        return done

    def items(self, values: Iterable[Any]) -> list[Any]:
        return [self.at(str(index), value) for index, value in enumerate(values)]


class _Encoder(_Walk):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = names
        self._names: dict[int, str] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or value is None or kind is bool:
            return value
        # JSON has no infinity or NaN, and some readers of it have no integers but those of a double.
        if (kind is int and -_EXACT < value < _EXACT) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return self.items(value)
        row = _BY_TYPE.get(kind) or _row_of(value)
        return {row.tag: row.to_json(self, value)}

    def pairs(self, values: Mapping[Any, Any]) -> list[list[Any]]:
        # Most keys are strings, and a state has thousands.
        return [
            [key if type(key) is str else self.at(f"key {key!r:.40}", key), self.at(str(key), value)]
            for key, value in values.items()
        ]

    def tensor(self, value: torch.Tensor) -> str:
        if why := why_not_bytes(value):
            raise ValueError(why)
        # One name per tensor, so that shared tensors are shared again after decoding.
        if id(value) not in self._names:
            name, count = self._known.get(id(value)) or "/".join(self.path), 1
            while name in self.tensors:  # 1 and "1" are different keys of a dict
                count += 1
                name = f"{'/'.join(self.path)}#{count}"
            self._names[id(value)] = name
            self.tensors[name] = value
        return self._names[id(value)]

    def array(self, value: np.ndarray[Any, Any]) -> list[Any]:
        name = _numbers(value.dtype.str).str
        data = empty_tensor("uint8", [value.nbytes])
        bytes_of(data)[:] = value.tobytes()
        return [name, list(value.shape), self.tensor(data)]


class _Decoder(_Walk):
    """A damaged or hostile document may have anything anywhere."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def value(self, value: Any) -> Any:
        if type(value) is list:
            return self.items(value)
        if type(value) is not dict:
            return value
        if len(value) != 1 or (row := _BY_TAG.get(next(iter(value)))) is None:
            raise ValueError(f"unknown tag {[*value]!r:.80}")
        return row.from_json(self, value[row.tag])

    def items(self, values: Any) -> list[Any]:
        return super().items(_typed(values, list))

    def pairs(self, pairs: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in _typed(pairs, list):
            name, value = _typed(pair, list)
            key = name if type(name) is str else self.at(f"key {name!r:.40}", name)
            if key in found:
                raise ValueError(f"a dict has two keys {key!r:.40}")
            found[key] = self.at(str(key), value)
        return found

    def tensor(self, name: Any) -> torch.Tensor:
        if (found := self._tensors.get(_typed(name, str))) is None:
            raise ValueError(f"there is no tensor {name!r:.80}")
        return found

    def array(self, parts: Any) -> Any:
        name, shape, of = _typed(parts, list)
        dtype, data = _numbers(name), self.tensor(of)
        shape = [_typed(size, int) for size in _typed(shape, list)]
        if data.dtype is not torch.uint8 or data.nbytes != dtype.itemsize * math.prod(shape):
            raise ValueError(f"an array of shape {shape!r:.80} has {data.nbytes} bytes")
        return np.ndarray(shape, dtype, bytearray(bytes_of(data)))

    def scalar(self, parts: Any) -> Any:
        name, data = _typed(parts, list)
        (found,) = np.frombuffer(_from_hex(data), _numbers(name))
        return found

    def deque(self, parts: Any) -> deque[Any]:
        most, items = _typed(parts, list)
        return deque(self.items(items), most)


def _from_hex(text: Any) -> bytes:
    return bytes.fromhex(_typed(text, str))


def _numbers(name: str) -> np.dtype[Any]:
    if not _NUMBERS.fullmatch(_typed(name, str)):
        raise ValueError(f"has NumPy's type {name}, which a checkpoint cannot store; use one of numbers")
    return np.dtype(name)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"not a {kind.__name__}: {value!r:.80}")
    return value


class _Row(NamedTuple):
    """How values of a type are stored."""

    tag: str
    of: type
    to_json: Callable[[_Encoder, Any], Any]
    from_json: Callable[[_Decoder, Any], Any]


_ROWS = (
    _Row("int", int, lambda _, x: hex(x), lambda _, x: int(_typed(x, str), 16)),
    _Row("float", float, lambda _, x: _DOUBLE.pack(x).hex(), lambda _, x: _DOUBLE.unpack(_from_hex(x))[0]),
    _Row(
        "complex",
        complex,
        lambda _, x: _PAIR.pack(x.real, x.imag).hex(),
        lambda _, x: complex(*_PAIR.unpack(_from_hex(x))),
    ),
    _Row(
        "bytes",
        bytes,
        lambda _, x: base64.b64encode(x).decode(),
        lambda _, x: base64.b64decode(_typed(x, str), validate=True),
    ),
    _Row("dtype", torch.dtype, lambda _, x: name_of(x), lambda _, x: dtype_named(_typed(x, str))),
    _Row("device", torch.device, lambda _, x: str(x), lambda _, x: torch.device(_typed(x, str))),
    _Row("size", torch.Size, _Encoder.items, lambda d, x: torch.Size(d.items(x))),
    _Row("tuple", tuple, _Encoder.items, lambda d, x: tuple(d.items(x))),
    _Row("set", set, lambda e, x: sorted(e.items(x), key=repr), lambda d, x: set(d.items(x))),
    _Row("dict", dict, _Encoder.pairs, _Decoder.pairs),
    _Row("ordered", OrderedDict, _Encoder.pairs, lambda d, x: OrderedDict(d.pairs(x))),
    _Row("counter", Counter, _Encoder.pairs, lambda d, x: Counter(d.pairs(x))),
    _Row("deque", deque, lambda e, x: [x.maxlen, e.items(x)], _Decoder.deque),
    _Row("tensor", torch.Tensor, _Encoder.tensor, _Decoder.tensor),
    _Row("array", np.ndarray, _Encoder.array, _Decoder.array),
    _Row("scalar", np.generic, lambda _, x: [_numbers(x.dtype.str).str, x.tobytes().hex()], _Decoder.scalar),
)
_BY_TYPE = {row.of: row for row in _ROWS}
_BY_TAG = {row.tag: row for row in _ROWS}


def _row_of(value: Any) -> _Row:
    """Find the row of a subclass."""
    if isinstance(value, torch.Tensor):
        return _BY_TYPE[torch.Tensor]
    if isinstance(value, np.number | np.bool_):
        return _BY_TYPE[np.generic]
    raise ValueError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store; "
        "store the numbers, strings, lists and dicts it consists of"
    )
