"""Splits nested state into a JSON document and tensors, and back (paper, section 9).

Only the types listed here are supported. Others are refused with their path and type, because restoring them
would mean running code that a file names. Tensors keep their exact bits, including those of NaNs.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.layout import bytes_of, dtype_named, name_of, why_not_bytes

__all__ = ["Encoded", "decode", "encode"]

# [Note: tagged JSON]
#
# null, booleans, strings, lists and numbers that JSON represents exactly are stored as they are. Everything
# else is an object with one key, a tag that says how to read its value. So is a dict, so that keys of any
# type and their order are preserved, and no user's key can be mistaken for a tag.

_DEPTH = 100
_EXACT = 1 << 53
_ARRAY = re.compile(r"[<>|][biufcmMSU]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,5})?")
_FACTORIES: dict[str, type] = {
    each.__name__: each for each in (bool, bytes, dict, float, int, list, set, str, tuple)
}
"""Allowed factories of a ``defaultdict``; anything else would be code that a file names."""


class Encoded(NamedTuple):
    document: Any
    """For ``json.dumps``."""
    tensors: dict[str, torch.Tensor]
    """By the name that the document refers to: the path in the tree where the tensor was found first."""


def encode(tree: Any) -> Encoded:
    """Split a tree. Raises ``CheckpointError`` with the path and type of an unsupported value."""
    encoder = _Encoder()
    return Encoded(encoder.encode(tree, ()), encoder.tensors)


def decode(document: Any, tensors: Mapping[str, torch.Tensor], named: Iterable[type] = ()) -> Any:
    """Restore a tree. A named tuple gets its class if that is among ``named``, and a look-alike otherwise.

    Raises ``DamagedError`` if this is not an encoded tree.
    """
    try:
        return _Decoder(tensors, named).decode(document, 0)
    except (ValueError, TypeError, OverflowError, struct.error, RuntimeError) as error:
        raise DamagedError(f"not the state of a checkpoint: {error}") from error


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._open: set[int] = set()
        self._kinds: dict[type, Callable[[Any, tuple[str, ...]], Any]] = {
            type(None): lambda value, _: value,
            bool: lambda value, _: value,
            str: lambda value, _: value,
            int: lambda value, _: value if abs(value) < _EXACT else {"int": hex(value)},
            float: lambda value, _: _number(value),
            complex: lambda value, _: {"complex": [_number(value.real), _number(value.imag)]},
            bytes: lambda value, _: {"bytes": _text(value)},
            torch.dtype: lambda value, _: {"dtype": name_of(value)},
            torch.device: lambda value, _: {"device": str(value)},
            torch.Size: lambda value, _: {"size": list(value)},
            list: self._items,
            tuple: lambda value, path: {"tuple": self._items(value, path)},
            set: lambda value, path: {"set": self._items(value, path)},
            frozenset: lambda value, path: {"frozenset": self._items(value, path)},
            dict: lambda value, path: {"dict": self._pairs(value, path)},
            OrderedDict: lambda value, path: {"ordered": self._pairs(value, path)},
            Counter: lambda value, path: {"counter": self._pairs(value, path)},
            deque: lambda value, path: {"deque": [value.maxlen, self._items(value, path)]},
            defaultdict: self._default,
            type(Path()): lambda value, _: {"path": str(value)},
            np.ndarray: self._array,
        }

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self._open or len(path) > _DEPTH:
            raise CheckpointError(f"{_place(path)} contains itself, or is nested more than {_DEPTH} deep")
        if kind := self._kinds.get(type(value)):
            pass
        elif isinstance(value, torch.Tensor):
            kind = self._tensor
        elif isinstance(value, np.generic):
            kind = self._scalar
        elif isinstance(value, Enum):
            kind = self._member
        elif isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
            kind = self._named
        else:
            raise CheckpointError(
                f"{_place(path)} is a {_title(type(value))}, which a checkpoint cannot store; "
                "store the numbers, strings, lists and dicts it consists of"
            )
        self._open.add(id(value))
        encoded = kind(value, path)
        self._open.discard(id(value))
        return encoded

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(index))) for index, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        return [
            [self._key(key, path), self.encode(value, (*path, str(key)))] for key, value in values.items()
        ]

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        # A shortcut: nearly all keys are strings, and a state has thousands.
        return key if type(key) is str else self.encode(key, (*path, f"key {key!r:.40}"))

    def _default(self, value: defaultdict[Any, Any], path: tuple[str, ...]) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise CheckpointError(
                f"{_place(path)} is a defaultdict of {factory!r:.80}, which a checkpoint cannot store; "
                f"use a dict, or a defaultdict of {', '.join(_FACTORIES)}"
            )
        return {"default": [name, self._pairs(value, path)]}

    def _member(self, value: Enum, path: tuple[str, ...]) -> Any:
        title = _title(type(value))
        if _enum_named(title) is not type(value) or value.name not in type(value).__members__:
            raise CheckpointError(
                f"{_place(path)} is {value!r:.80} of {title}, which cannot be found by that name; "
                "define the enumeration at module level, or store the member's value"
            )
        return {"enum": [title, value.name]}

    def _named(self, value: Any, path: tuple[str, ...]) -> Any:
        fields = zip(value._fields, value, strict=True)
        return {
            "named": [
                _title(type(value)),
                [[name, self.encode(each, (*path, name))] for name, each in fields],
            ]
        }

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        if why := why_not_bytes(value):
            raise CheckpointError(f"{_place(path)} {why}")
        # One name per tensor, so that shared tensors are shared again after decoding.
        if id(value) not in self._names:
            self._names[id(value)] = self._keep(value, path)
        return {"tensor": self._names[id(value)]}

    def _keep(self, value: torch.Tensor, path: tuple[str, ...]) -> str:
        name, count = "/".join(path), 1
        while name in self.tensors:  # 1 and "1" are different keys of a dict
            count += 1
            name = f"{'/'.join(path)}#{count}"
        self.tensors[name] = value
        return name

    def _array(self, value: np.ndarray[Any, Any], path: tuple[str, ...]) -> Any:
        _refuse_array(value.dtype, path)
        data = torch.empty(value.nbytes, dtype=torch.uint8, device="cpu")
        bytes_of(data)[:] = value.tobytes()
        return {"array": [value.dtype.str, list(value.shape), self._keep(data, path)]}

    def _scalar(self, value: np.generic, path: tuple[str, ...]) -> Any:
        _refuse_array(value.dtype, path)
        return {"scalar": [value.dtype.str, _text(value.tobytes())]}


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], named: Iterable[type]) -> None:
        self._tensors = tensors
        self._named = {_title(each): each for each in named}
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "int": lambda value, _: int(_typed(value, str), 16),
            "float": lambda value, _: struct.unpack(">d", bytes.fromhex(value))[0],
            "complex": lambda value, depth: complex(*self._many(_pair(value), depth)),
            "bytes": lambda value, _: _bytes(value),
            "dtype": lambda value, _: dtype_named(value),
            "device": lambda value, _: torch.device(_matching(_DEVICE, value)),
            "size": lambda value, depth: torch.Size(self._many(value, depth)),
            "tuple": lambda value, depth: tuple(self._many(value, depth)),
            "set": lambda value, depth: set(self._many(value, depth)),
            "frozenset": lambda value, depth: frozenset(self._many(value, depth)),
            "dict": self._dict,
            "ordered": lambda value, depth: OrderedDict(self._dict(value, depth)),
            "counter": lambda value, depth: Counter(self._dict(value, depth)),
            "deque": self._deque,
            "default": self._default,
            "path": lambda value, _: Path(_typed(value, str)),
            "enum": lambda value, _: _member(value),
            "array": lambda value, _: self._array(value),
            "scalar": lambda value, _: _scalar(value),
            "named": self._named_tuple,
            "tensor": lambda value, _: self._tensor(value),
        }

    def decode(self, document: Any, depth: int) -> Any:
        if depth > _DEPTH + 1:
            raise ValueError(f"nested more than {_DEPTH} deep")
        if isinstance(document, list):
            return self._many(document, depth)
        if not isinstance(document, dict):
            return document
        if len(document) != 1 or (tag := next(iter(document))) not in self._kinds:
            raise ValueError(f"unknown tag {list(document)!r:.80}")
        return self._kinds[tag](document[tag], depth)

    def _many(self, values: Any, depth: int) -> list[Any]:
        return [self.decode(value, depth + 1) for value in _typed(values, list)]

    def _dict(self, pairs: Any, depth: int) -> dict[Any, Any]:
        decoded = [self._many(_pair(pair), depth) for pair in _typed(pairs, list)]
        found = dict(map(tuple, decoded))
        if len(found) < len(decoded):
            raise ValueError("a dict has a duplicate key")
        return found

    def _deque(self, value: Any, depth: int) -> deque[Any]:
        most, items = _pair(value)
        return deque(self._many(items, depth), None if most is None else _typed(most, int))

    def _default(self, value: Any, depth: int) -> defaultdict[Any, Any]:
        name, pairs = _pair(value)
        if name is not None and name not in _FACTORIES:
            raise ValueError(f"unknown factory {name!r:.40}")
        return defaultdict(None if name is None else _FACTORIES[name], self._dict(pairs, depth))

    def _named_tuple(self, value: Any, depth: int) -> Any:
        title, fields = _pair(value)
        pairs = [_pair(each) for each in _typed(fields, list)]
        names = [_typed(name, str) for name, _ in pairs]
        values = self._many([each for _, each in pairs], depth)
        known = self._named.get(_typed(title, str))
        if known is not None and list(getattr(known, "_fields", ())) == names:
            return known(*values)
        return namedtuple(title.rpartition(".")[2], names)(*values)

    def _tensor(self, name: Any) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"there is no tensor {name!r:.80}")
        return self._tensors[name]

    def _array(self, value: Any) -> Any:
        text, shape, name = _typed(value, list)
        dtype, data = np.dtype(_matching(_ARRAY, text)), self._tensor(name)
        if data.dtype is not torch.uint8 or data.nbytes != dtype.itemsize * math.prod(_typed(shape, list)):
            raise ValueError(f"array {name!r:.80} has other bytes than its shape {shape!r:.80}")
        return np.ndarray(shape, dtype, bytearray(bytes_of(data)))


def _scalar(value: Any) -> Any:
    text, data = _pair(value)
    dtype = np.dtype(_matching(_ARRAY, text))
    if len(_bytes(data)) != dtype.itemsize:
        raise ValueError(f"not a {text}: {data!r:.80}")
    return np.ndarray((), dtype, _bytes(data))[()] if dtype.itemsize else dtype.type()


def _member(value: Any) -> Enum:
    title, name = _pair(value)
    kind = _enum_named(_typed(title, str))
    if kind is None or _typed(name, str) not in kind.__members__:
        raise ValueError(f"this process has no enumeration {title!r:.80} with a member {name!r:.40}")
    return kind.__members__[name]


def _enum_named(title: str) -> type[Enum] | None:
    """Find an enumeration that this process has already defined; nothing is imported or called."""
    parts = title.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for name in parts[count:]:
            found = vars(found).get(name) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and issubclass(found, Enum):
            return found
    return None


def _number(value: float) -> Any:
    """JSON has no infinity or NaN, and the bits of a NaN matter."""
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(_typed(text, str), validate=True)


def _place(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the state"


def _title(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _refuse_array(dtype: np.dtype[Any], path: tuple[str, ...]) -> None:
    if not _ARRAY.fullmatch(dtype.str):
        raise CheckpointError(f"{_place(path)} is an array of {dtype}, which a checkpoint cannot store")


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"unknown kind {text!r:.40}")
    return text


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"not a {kind.__name__}: {value!r:.80}")
    return value


def _pair(value: Any) -> list[Any]:
    if type(value) is not list or len(value) != 2:
        raise ValueError(f"not a pair: {value!r:.80}")
    return value
