"""Reads dumps of PyTorch's Flight Recorder without executing any code of a pickle."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchscout.decision.flight_recorder import Dump, read_dump

__all__ = [
    "MOST_RANKS",
    "DumpFile",
    "DumpFilesError",
    "PickleRefusedError",
    "files_in",
    "load",
    "read_files",
]

# fmt: off
_ALLOWED = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT",
    "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_DICT", "DICT",
    "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "MEMOIZE",
)
# fmt: on

# Python's pure-Python unpickler with fewer instructions. The one in C cannot be restricted to some
# instructions, and a single number in a file makes it allocate any amount of memory.
_Loader: Any = pickle._Unpickler


class PickleRefusedError(ValueError):
    """The pickle contains more than plain data, or is damaged."""


class _PlainLoader(_Loader):  # type: ignore[misc]
    dispatch = {  # noqa: RUF012  as the base class has it
        code: _Loader.dispatch[code] for code in (getattr(pickle, name)[0] for name in _ALLOWED)
    }


def load(data: bytes) -> object:
    """The plain data in a pickle. Raises ``PickleRefusedError`` for anything else."""
    try:
        return _PlainLoader(io.BytesIO(data)).load()
    except KeyError as error:
        if isinstance(error.args[0], int) and chr(error.args[0]) in _FORBIDDEN:
            name = _FORBIDDEN[chr(error.args[0])]
            raise PickleRefusedError(
                f"refused: its pickle instruction {name} is not plain data, and could run any code"
            ) from error
        raise PickleRefusedError("it is damaged") from error
    except (EOFError, pickle.UnpicklingError, struct.error) as error:
        raise PickleRefusedError("it is incomplete or damaged") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise PickleRefusedError("it is damaged") from error


_FORBIDDEN = {
    getattr(pickle, name).decode("latin-1"): name
    for name in dir(pickle)
    if name.isupper() and isinstance(getattr(pickle, name), bytes) and len(getattr(pickle, name)) == 1
    if name not in _ALLOWED
}


MOST_BYTES = 256 << 20
_SUFFIXES = (".json", ".pkl", ".pickle", ".bin", ".dump", ".txt", ".trace")
MOST_RANKS = 1_000_000


class DumpFilesError(Exception):
    """The files cannot be explained together."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file, and the dump in it."""

    path: Path
    rank: int
    dump: Dump | None
    problem: str | None = None
    """Why there is no dump."""


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Files, and the files in folders sorted by name, without hidden ones."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (each for each in sorted(path.iterdir()) if not each.name.startswith("."))
            found += [each for each in inside if each.is_file()]
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read_files(paths: Sequence[Path], pattern: re.Pattern[str] | None) -> list[DumpFile]:
    """Read all of ``paths``, sorted by rank. Raises ``DumpFilesError`` if a file's rank is unclear."""
    ranks: dict[int, Path] = {}
    for path in paths:
        rank = _rank_of(path, pattern)
        if rank in ranks:
            raise DumpFilesError(
                f"{ranks[rank]} and {path} are both of rank {rank}: give one dump of each rank, all taken at "
                "the same time, or give --rank-pattern to find the rank in the name"
            )
        ranks[rank] = path
    return [_read(ranks[rank], rank) for rank in sorted(ranks)]


def _rank_of(path: Path, pattern: re.Pattern[str] | None) -> int:
    name = path.name
    if pattern is None:
        while (stem := Path(name)).suffix.lower() in _SUFFIXES:
            name = stem.stem
        found = re.search(r"(\d{1,9})$", name)
    else:
        found = pattern.search(str(path))
    try:
        rank = -1 if found is None else int(found[1])
    except (IndexError, ValueError, TypeError):
        rank = -1
    if not 0 <= rank < MOST_RANKS:
        raise DumpFilesError(
            f"the name of {path} does not end with a rank, as in nccl_trace_rank_3 or rank3.json; "
            "give --rank-pattern with the rank in parentheses, as in --rank-pattern 'worker(\\d+)-'"
        )
    return rank


def _read(path: Path, rank: int) -> DumpFile:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return DumpFile(path, rank, None, f"too large: {size:,} bytes; at most {MOST_BYTES:,} are read")
        data = path.read_bytes()
        return DumpFile(path, rank, read_dump(rank, _document(data)))
    except OSError as error:
        return DumpFile(path, rank, None, f"cannot be read: {error.strerror or error}")
    except ValueError as error:
        return DumpFile(path, rank, None, str(error))
    except (RecursionError, MemoryError):
        return DumpFile(path, rank, None, "too large, or nested too deeply")


def _document(data: bytes) -> object:
    if not data.strip():
        raise ValueError("it is empty")
    if data.lstrip()[:1] not in (b"{", b"["):
        return load(data)
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"invalid JSON: {error}") from error
