"""Finds and reads the files of Flight Recorder dumps: which rank each is of, and what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchscout.cli.explain import plain_pickle
from torchscout.decision.hang.flight_recorder import Dump, read_dump

__all__ = ["DumpFile", "DumpFilesError", "files_in", "read_files"]

MOST_BYTES = 256 << 20
_SUFFIXES = (".json", ".pkl", ".pickle", ".bin", ".dump", ".txt", ".trace")
_MOST_RANKS = 1_000_000


class DumpFilesError(Exception):
    """These files cannot be explained together."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file that was read, or was tried."""

    path: Path
    rank: int
    dump: Dump | None
    problem: str | None = None
    """Why there is no dump."""


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, and the files of folders, by name; hidden ones are left out."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (each for each in sorted(path.iterdir()) if not each.name.startswith("."))
            found += [each for each in inside if each.is_file()]
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read_files(paths: Sequence[Path], pattern: re.Pattern[str] | None) -> list[DumpFile]:
    """All of ``paths``, by rank; raises ``DumpFilesError`` where it is not clear whose a file is."""
    ranks: dict[int, Path] = {}
    for path in paths:
        rank = _rank_of(path, pattern)
        if rank in ranks:
            raise DumpFilesError(
                f"{ranks[rank]} and {path} are both of rank {rank}: give one dump of each rank, "
                "all of the same moment, or say with --rank-pattern where the rank stands in the name"
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
    if not 0 <= rank < _MOST_RANKS:
        raise DumpFilesError(
            f"whose dump is {path}? A name ends with the rank, as in nccl_trace_rank_3 or rank3.json; "
            "otherwise give --rank-pattern with the rank in parentheses, as in --rank-pattern 'worker(\\d+)-'"
        )
    return rank


def _read(path: Path, rank: int) -> DumpFile:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return DumpFile(path, rank, None, f"it has {size:,} bytes; at most {MOST_BYTES:,} are read")
        data = path.read_bytes()
        return DumpFile(path, rank, read_dump(rank, _document(data)))
    except OSError as error:
        return DumpFile(path, rank, None, f"it cannot be read: {error.strerror or error}")
    except ValueError as error:
        return DumpFile(path, rank, None, str(error))
    except (RecursionError, MemoryError):
        return DumpFile(path, rank, None, "it is nested too deeply, or too large")


def _document(data: bytes) -> object:
    if not data.strip():
        raise ValueError("it is empty")
    if data.lstrip()[:1] not in (b"{", b"["):
        return plain_pickle.load(data)
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not whole JSON: {error}") from error
