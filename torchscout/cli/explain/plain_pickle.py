"""Reads pickles that hold plain data, and nothing else can happen while they are read.

A pickle is a program. This loader knows only the instructions that build dictionaries, lists, tuples,
text, bytes, numbers, booleans and None; any other one, such as that which imports a class, ends it.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

__all__ = ["PickleRefusedError", "load"]

_ALLOWED = (
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "EMPTY_LIST",
    "LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
    "GET",
    "BINGET",
    "LONG_BINGET",
    "MEMOIZE",
)

# The interpreter's own loader in Python, with fewer instructions. The one in C cannot be restricted
# instruction by instruction, and a single number in a file makes it allocate any amount of memory.
_Loader: Any = pickle._Unpickler


class PickleRefusedError(ValueError):
    """A pickle that is more than plain data, or is damaged."""


class _PlainLoader(_Loader):  # type: ignore[misc]
    dispatch = {  # noqa: RUF012  as the base class has it
        code: _Loader.dispatch[code] for code in (getattr(pickle, name)[0] for name in _ALLOWED)
    }


def load(data: bytes) -> object:
    """The plain data in a pickle; raises ``PickleRefusedError`` for everything else."""
    try:
        return _PlainLoader(io.BytesIO(data)).load()
    except PickleRefusedError:
        raise
    except KeyError as error:
        if isinstance(error.args[0], int) and chr(error.args[0]) in _FORBIDDEN:
            name = _FORBIDDEN[chr(error.args[0])]
            raise PickleRefusedError(
                f"it is refused: its instruction {name} makes more than plain data, and could run any code"
            ) from error
        raise PickleRefusedError("it is damaged") from error
    except (EOFError, pickle.UnpicklingError, struct.error) as error:
        raise PickleRefusedError("it ends too soon, or is damaged") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise PickleRefusedError("it is damaged") from error


_FORBIDDEN = {
    getattr(pickle, name).decode("latin-1"): name
    for name in dir(pickle)
    if name.isupper() and isinstance(getattr(pickle, name), bytes) and len(getattr(pickle, name)) == 1
    if name not in _ALLOWED
}
