"""Exports one generation, whatever its layout, without ranks (paper, section 9)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torchscout.checkpoint.export import dcp, safetensors
from torchscout.checkpoint.export.target import new_folder
from torchscout.checkpoint.reshard.reader import ShardReader
from torchscout.checkpoint.reshard.whole_state import WholeState, describe
from torchscout.checkpoint.storage.shards import OpenShard

__all__ = ["MANIFEST", "Exported", "Format", "export"]

MANIFEST = "torchscout.json"
"""Says where an exported checkpoint comes from, and how far it is trusted."""


class Format(str, Enum):
    DCP = "dcp"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    """In words."""
    notes: tuple[str, ...]
    """Choices and damage, in words."""


def export(
    files: Mapping[int, Sequence[Path]],
    target: Path,
    to: Format,
    *,
    optimizer: bool = False,
    force: bool = False,
    origin: Mapping[str, object],
) -> Exported:
    """Write the state in these shards, of all ranks of a job, to a new folder.

    ``files`` has the copies of each rank's shard, the preferred ones first; ``origin`` is written beside the
    state. Raises ``CheckpointError``, with the file's name if one is damaged, and then writes nothing. What a
    running job deletes meanwhile is exported all the same: a file of each rank is kept open.
    """
    if to is Format.SAFETENSORS:
        safetensors.require_package()
    with ExitStack() as open_files, new_folder(target, force=force) as folder:
        opened: dict[Path, OpenShard] = {}
        for _, copies in sorted(files.items()):
            opened[copies[0]] = open_files.enter_context(closing(OpenShard(copies[0])))
        state, read = describe([each.header for each in opened.values()]), ShardReader(files, opened)
        left_out = ["random state, registered objects and modules' extra state"]
        if to is Format.DCP:
            dcp.write(state, read, folder)
        else:
            left_out += safetensors.write(state, read, folder, optimizer=optimizer)
        notes = [*state.notes, *read.problems]
        manifest = {"schema": 1, **origin, "format": to.value, "left_out": left_out, "notes": notes}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        size = sum(each.stat().st_size for each in folder.iterdir())
        return Exported(_count(state), size, tuple(left_out), tuple(notes))


def _count(state: WholeState) -> int:
    return sum(map(len, state.tensors.values()))
