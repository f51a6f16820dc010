"""How each rank of a job came to its end: one small file per rank in the run directory. Torch-free.

A session that is closed writes its own; of a trainer that ended in any other way, its observer does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from torchscout.private_files import make_folders, replace_text

__all__ = ["End", "How", "read_ends"]

How = Literal["finished", "interrupted", "failed", "killed"]
"""``interrupted``: by SIGINT, SIGTERM or SIGHUP. ``failed``: by an exception or a non-zero exit status.
``killed``: by any other signal, or nobody could tell."""


@dataclass(frozen=True, slots=True)
class End:
    """Of one rank."""

    rank: int
    how: How
    step: int
    """Training steps that it had finished."""
    record: str
    """The progress record of the session that ended, as in the rank's entry: another one's end is out of
    date."""
    why: str = ""
    """The exception, where there was one."""

    def write(self, run_dir: Path) -> None:
        """An ``OSError`` if it cannot be written."""
        path = _path(run_dir, self.rank)
        make_folders(path.parent)
        replace_text(path, json.dumps(asdict(self)) + "\n")

    def is_written(self, run_dir: Path) -> bool:
        """Whether there is an end of the same session."""
        found = _read(_path(run_dir, self.rank))
        return found is not None and found.record == self.record


def read_ends(run_dir: Path) -> dict[int, End]:
    """By rank; what is not an end is left out."""
    folder = run_dir / "ends"
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [_read(path) for path in paths if path.match("rank-*.json")]
    return {each.rank: each for each in found if each is not None}


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "ends" / f"rank-{rank}.json"


def _read(path: Path) -> End | None:
    try:
        end = End(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    is_sound = type(end.rank) is int and type(end.step) is int and end.how in get_args(How)
    return end if is_sound and isinstance(end.why, str) else None
