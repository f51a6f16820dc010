"""Encodes nested state as a JSON document and tensors, and decodes it (paper, section 9).

Only the types in ``_KINDS`` are supported. Others are refused with their path and type, because restoring
them would mean running code that a file names. Numbers keep their exact bits, including those of NaNs.
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
# else is an object with one key, a tag that says how to read its value: see ``_KINDS``. So is a dict, so that
# keys of any type and their order are preserved, and no user's key can be mistaken for a tag.

_DEPTH = 100
_EXACT = 1 << 53
_DOUBLE = struct.Struct(">d")
_ARRAY = re.compile(r"[<>|][biufcmMSU]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{each.__name__: each for each in (bool, bytes, dict, float, int, list, set, str, tuple)},
}
"""Allowed factories of a ``defaultdict``; anything else would be code that a file names."""


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
        raise CheckpointError(f"{'/'.join(encoder.path) or 'the state'} {error}") from error


def decode(document: Any, tensors: Mapping[str, torch.Tensor], named: Iterable[type] = ()) -> Any:
    """Restore a tree. A named tuple gets its class if that is among ``named``, and a look-alike otherwise.

    Raises ``DamagedError`` if this is not an encoded tree.
    """
    try:
        return _Decoder(tensors, named).value(document, 0)
    except (ValueError, TypeError, OverflowError, struct.error, RuntimeError) as error:
        raise DamagedError(f"not the state of a checkpoint: {error}") from error


class _Encoder:
    """Methods raise ``ValueError`` for what cannot be stored; ``path`` says then where it is."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.path: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = names
        self._names: dict[int, str] = {}

    def value(self, value: Any) -> Any:
        if len(self.path) > _DEPTH:
            raise ValueError(f"contains itself, or is nested more than {_DEPTH} deep")
        if _is_json(value):
            return value
        if type(value) is list:
            return self.items(value)
        kind = _kind_of(value)
        parts = kind.take_apart(value)
        if not isinstance(kind.form, tuple):
            return {kind.tag: _FORMS[kind.form].write(self, parts)}
        pairs = zip(kind.form, parts, strict=True)
        return {kind.tag: [_FORMS[form].write(self, part) for form, part in pairs]}

    def items(self, values: list[Any]) -> list[Any]:
        return [self._inner(str(index), value) for index, value in enumerate(values)]

    def pairs(self, values: dict[Any, Any]) -> list[list[Any]]:
        # Most keys are strings, and a state has thousands.
        return [
            [key if type(key) is str else self._inner(f"key {key!r:.40}", key), self._inner(str(key), value)]
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

    def _inner(self, name: str, value: Any) -> Any:
        self.path.append(name)
        encoded = self.value(value)
        self.path.pop()
        return encoded


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], named: Iterable[type]) -> None:
        self._tensors = tensors
        self._named = {_title(each): each for each in named}

    def value(self, document: Any, depth: int) -> Any:
        if depth > _DEPTH + 1:
            raise ValueError(f"nested more than {_DEPTH} deep")
        if isinstance(document, list):
            return self.items(document, depth)
        if not isinstance(document, dict):
            return document
        if len(document) != 1 or (tag := next(iter(document))) not in _BY_TAG:
            raise ValueError(f"unknown tag {list(document)!r:.80}")
        kind, parts = _BY_TAG[tag], document[tag]
        if not isinstance(kind.form, tuple):
            return kind.make(_FORMS[kind.form].read(self, parts, depth))
        pairs = zip(kind.form, _typed(parts, list), strict=True)
        return kind.make(*(_FORMS[form].read(self, part, depth) for form, part in pairs))

    def items(self, values: Any, depth: int) -> list[Any]:
        return [self.value(value, depth + 1) for value in _typed(values, list)]

    def pairs(self, pairs: Any, depth: int) -> dict[Any, Any]:
        found = dict(self.items(pair, depth) for pair in _typed(pairs, list))
        if len(found) < len(pairs):
            raise ValueError("a dict has a duplicate key")
        return found

    def tensor(self, name: Any, _: int) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"there is no tensor {name!r:.80}")
        return self._tensors[name]

    def named(self, title: Any, _: int) -> Any:
        return self._named.get(_typed(title, str), title)


class _Form(NamedTuple):
    """A part of a value in the document."""

    write: Callable[[_Encoder, Any], Any]
    read: Callable[[_Decoder, Any, int], Any]
    """Gets the part and its depth. In a hostile file the part may be anything."""


_FORMS: dict[type, _Form] = {
    object: _Form(_Encoder.value, _Decoder.value),
    str: _Form(lambda _, text: text, lambda _, text, __: _typed(text, str)),
    bytes: _Form(
        lambda _, data: base64.b64encode(data).decode(),
        lambda _, text, __: base64.b64decode(_typed(text, str), validate=True),
    ),
    list: _Form(_Encoder.items, _Decoder.items),
    dict: _Form(_Encoder.pairs, _Decoder.pairs),
    torch.Tensor: _Form(_Encoder.tensor, _Decoder.tensor),
    type: _Form(lambda _, named: _title(named), _Decoder.named),
}


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise ValueError(
        f"is a defaultdict of {value.default_factory!r:.80}, which a checkpoint cannot store; "
        f"use a dict, or a defaultdict of {', '.join(filter(None, _FACTORIES))}"
    )


def _defaultdict(name: Any, values: dict[Any, Any]) -> defaultdict[Any, Any]:
    if name not in _FACTORIES:
        raise ValueError(f"unknown factory {name!r:.40}")
    return defaultdict(_FACTORIES[name], values)


def _named_parts(value: Any) -> tuple[type, dict[str, Any]]:
    return type(value), dict(zip(value._fields, value, strict=True))


def _named_tuple(known: Any, fields: dict[Any, Any]) -> Any:
    if isinstance(known, type) and getattr(known, "_fields", None) == tuple(fields):
        return known(*fields.values())
    title = _title(known) if isinstance(known, type) else known
    names = [_typed(name, str) for name in fields]
    return namedtuple(title.rpartition(".")[2], names)(*fields.values())


def _member_name(value: Enum) -> tuple[str, str]:
    title = _title(type(value))
    if _enum_named(title) is not type(value) or value.name not in type(value).__members__:
        raise ValueError(
            f"is {value!r:.80} of {title}, which cannot be found by that name; "
            "define the enumeration at module level, or store the member's value"
        )
    return title, value.name


def _member(title: str, name: str) -> Enum:
    kind = _enum_named(title)
    if kind is None or name not in kind.__members__:
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


def _array_parts(value: np.ndarray[Any, Any]) -> tuple[str, list[int], torch.Tensor]:
    data = empty_tensor("uint8", [value.nbytes])
    bytes_of(data)[:] = value.tobytes()
    return _array_type(value.dtype.str).str, list(value.shape), data


def _array(type_name: str, shape: list[int], data: torch.Tensor) -> Any:
    dtype = _array_type(type_name)
    if data.dtype is not torch.uint8 or data.nbytes != dtype.itemsize * math.prod(shape):
        raise ValueError(f"an array of shape {shape!r:.80} has {data.nbytes} bytes")
    return np.ndarray(shape, dtype, bytearray(bytes_of(data)))


def _scalar_parts(value: np.generic) -> tuple[str, bytes]:
    dtype = _array_type(value.dtype.str)
    return dtype.str, value.tobytes()[: dtype.itemsize]  # NumPy gives an empty string four bytes


def _scalar(type_name: str, data: bytes) -> Any:
    dtype = _array_type(type_name)
    if len(data) != dtype.itemsize:
        raise ValueError(f"not a {type_name}: {data!r:.80}")
    return np.ndarray((), dtype, data)[()] if dtype.itemsize else dtype.type()


def _array_type(name: str) -> np.dtype[Any]:
    if not _ARRAY.fullmatch(name):
        raise ValueError(f"is an array of {name}, which a checkpoint cannot store")
    return np.dtype(name)


def _title(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"not a {kind.__name__}: {value!r:.80}")
    return value


def _same(value: Any) -> Any:
    return value


class _Kind(NamedTuple):
    """How values of a type are stored."""

    tag: str
    of: type
    form: type | tuple[type, ...]
    """What one is stored as, or what each of its parts is: keys of ``_FORMS``."""
    take_apart: Callable[[Any], Any]
    make: Callable[..., Any]
    """Raises ``ValueError``, ``TypeError`` or ``RuntimeError`` for parts that it cannot be made of."""


_KINDS = (
    _Kind("int", int, str, hex, lambda x: int(x, 16)),
    _Kind(
        "float", float, str, lambda x: _DOUBLE.pack(x).hex(), lambda x: _DOUBLE.unpack(bytes.fromhex(x))[0]
    ),
    _Kind("complex", complex, (object, object), lambda x: (x.real, x.imag), complex),
    _Kind("bytes", bytes, bytes, _same, _same),
    _Kind("path", type(Path()), str, str, Path),
    _Kind("dtype", torch.dtype, str, name_of, dtype_named),
    _Kind("device", torch.device, str, str, torch.device),
    _Kind("size", torch.Size, list, list, torch.Size),
    _Kind("tuple", tuple, list, list, tuple),
    _Kind("set", set, list, list, set),
    _Kind("frozenset", frozenset, list, list, frozenset),
    _Kind("dict", dict, dict, _same, _same),
    _Kind("ordered", OrderedDict, dict, _same, OrderedDict),
    _Kind("counter", Counter, dict, _same, Counter),
    _Kind("default", defaultdict, (object, dict), lambda x: (_factory_name(x), x), _defaultdict),
    _Kind(
        "deque", deque, (object, list), lambda x: (x.maxlen, list(x)), lambda most, items: deque(items, most)
    ),
    _Kind("tensor", torch.Tensor, torch.Tensor, _same, _same),
    _Kind("array", np.ndarray, (str, list, torch.Tensor), _array_parts, _array),
    _Kind("scalar", np.generic, (str, bytes), _scalar_parts, _scalar),
    _Kind("enum", Enum, (str, str), _member_name, _member),
)
_NAMED = _Kind("named", tuple, (type, dict), _named_parts, _named_tuple)
"""Named tuples have no type in common."""
_BY_TYPE = {kind.of: kind for kind in _KINDS}
_BY_TAG = {kind.tag: kind for kind in (*_KINDS, _NAMED)}


def _kind_of(value: Any) -> _Kind:
    if (kind := _BY_TYPE.get(type(value))) is not None:
        return kind
    for base in (torch.Tensor, np.generic, Enum):
        if isinstance(value, base):
            return _BY_TYPE[base]
    if isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        return _NAMED
    raise ValueError(
        f"is a {_title(type(value))}, which a checkpoint cannot store; "
        "store the numbers, strings, lists and dicts it consists of"
    )


def _is_json(value: Any) -> bool:
    """Whether JSON represents this value exactly; it has no infinity or NaN, and the bits of a NaN matter."""
    kind = type(value)
    if kind is int:
        return bool(abs(value) < _EXACT)
    return math.isfinite(value) if kind is float else kind in (str, bool, type(None))
