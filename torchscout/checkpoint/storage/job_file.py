"""Which job a checkpoint folder belongs to: the file ``job`` in it (paper, section 9).

The name lives in the folder, so that it does not depend on the path by which the folder is reached. It names
the job's folder in memory, and every shard and ledger says whose it is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from torchscout.checkpoint import ledger
from torchscout.checkpoint.storage import shards
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError

__all__ = ["agreed_name", "name_in", "write"]

_FILE = "job"
_MOST_BYTES = 1024


def name_in(folder: Path) -> str | None:
    """The job to which this folder belongs; None if it belongs to none yet, or does not exist.

    Folders of earlier versions have no such file; there the ledgers say it.
    """
    try:
        with (folder / _FILE).open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return _name_in_ledgers(folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / _FILE}: {error.strerror}") from error
    if not JOB_NAME.fullmatch(text):
        raise CheckpointError(f"{folder / _FILE} does not hold the name of a job, but {text!r:.80}")
    return text


def write(folder: Path, name: str) -> None:
    """Let this folder belong to that job."""
    shards.replace(folder / _FILE, [f"{name}\n".encode()])


def agreed_name(wanted: str | None, folder: Path, found: Sequence[str | None]) -> str:
    """The job's name, given the one that was configured and the ones that ranks find in their folders.

    A new one where there is neither, for the first rank to say. ``CheckpointError`` if they do not agree.
    """
    names = list(dict.fromkeys(each for each in found if each is not None))
    if wanted is not None and names and names != [wanted]:
        raise CheckpointError(
            f"{folder} belongs to job {names[0]!r}, not to {wanted!r}. Leave CheckpointConfig(job=) out, run "
            f"`scout checkpoint adopt {folder} --as {wanted}`, or give another directory"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"ranks find checkpoints of different jobs in {folder}: {', '.join(map(repr, names))}. Give "
            "another directory, or let one job adopt them: scout checkpoint adopt DIR --as NAME"
        )
    return wanted or (names[0] if names else _new_name(folder))


def _new_name(folder: Path) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name)[:64].lstrip("-.")
    return f"{readable or 'job'}-{secrets.token_hex(6)}"


def _name_in_ledgers(folder: Path) -> str | None:
    try:
        ranks = ledger.ranks_in(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    return next(filter(None, (_name_in_ledger(folder, rank) for rank in ranks)), None)


def _name_in_ledger(folder: Path, rank: int) -> str | None:
    try:
        found = ledger.inspect(folder, rank)
    except CheckpointError:  # damaged; what that means is for a recovery to say
        return None
    return None if found is None else found.job
