"""Mutants of valid inputs, by seed: documents with exchanged parts, and bytes flipped, cut and joined."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MUTANTS = int(os.environ.get("SCOUT_FUZZ", "120"))
"""Inputs of each format."""
_MOST_BYTES = 64 << 20
_MOST_SECONDS = 20.0

_ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "0", "\0", "\ud800", "a" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [None], {"": None}, {"kind": []}, [0] * 300, "NaN"),
]


def tried(
    attempt: Callable[[random.Random], object],
    documented: tuple[type[Exception], ...],
    corpus: tuple[int, ...] = (),
) -> None:
    """Check that each input ends in a result or a documented error, soon and without much memory.

    ``corpus``: seeds that failed once, and are tried whatever the number of inputs is.
    """
    with _limited_memory():
        for seed in (*corpus, *range(MUTANTS)):
            with suppress(*documented), _watched(seed):
                attempt(random.Random(seed))


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let this process allocate ``_MOST_BYTES`` more than it has; beyond that it gets a ``MemoryError``.

    A limit of the system costs nothing, where ``tracemalloc`` would take most of the time.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = 1024 * int(status["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + _MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def _watched(seed: int) -> Iterator[None]:
    """Name the seed with which something failed, or took too long."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {_MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
    try:
        yield
    except Exception as error:
        error.add_note(f"with seed {seed}") if hasattr(error, "add_note") else None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def document_mutant(chance: random.Random, document: Any) -> Any:
    """Replace, remove, double or exchange one or a few parts of a JSON document."""
    mutant = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        mutant = _changed(chance, mutant, _paths(mutant))
    return mutant


def text_mutant(chance: random.Random, document: Any) -> bytes:
    """Return a mutant as JSON, sometimes with its bytes changed as well, or nested too deeply."""
    if chance.random() < 0.02:
        return b"[" * 50_000 + b"]" * 50_000
    data = json.dumps(document_mutant(chance, document)).encode("utf-8", "surrogatepass")
    return bytes_mutant(chance, data) if chance.random() < 0.3 else data


def bytes_mutant(chance: random.Random, data: bytes) -> bytes:
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(mutant) + 1)
        match chance.randrange(5):
            case 0 if mutant:
                mutant[at % len(mutant)] ^= 1 << chance.randrange(8)
            case 1:
                del mutant[at:]
            case 2:
                mutant[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                del mutant[at : at + chance.randrange(1, 65)]
            case _:
                mutant[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
    return bytes(mutant)


def _paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = (
        document.keys()
        if isinstance(document, dict)
        else range(len(document))
        if isinstance(document, list)
        else ()
    )
    return [path, *(each for key in keys for each in _paths(document[key], (*path, key)))]


def _changed(chance: random.Random, document: Any, paths: list[tuple[Any, ...]]) -> Any:
    path, value = chance.choice(paths), copy.deepcopy(chance.choice(_ODD))
    if not path:
        return value if chance.random() < 0.1 else document
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    match chance.randrange(4):
        case 0:
            del parent[path[-1]]
        case 1 if isinstance(parent, dict):
            parent[chance.choice(["extra", "rank", ""])] = value
        case 2 if len(parent) > 1:
            other = chance.choice([*parent.keys()] if isinstance(parent, dict) else [*range(len(parent))])
            parent[path[-1]] = copy.deepcopy(parent[other])
        case _:
            parent[path[-1]] = value
    return document
