"""Reads tensors of a whole job from the shards of its ranks, and verifies them (paper, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from torchscout.checkpoint.reshard.parts import Part, Shared, shared
from torchscout.checkpoint.reshard.whole_state import StoredPart, WholeTensor
from torchscout.checkpoint.storage.shard_format import Entry
from torchscout.checkpoint.storage.shards import OpenShard, inspect, read_tensor
from torchscout.errors import CheckpointError, DamagedError
from torchscout.state.layout import empty_tensor, fill

__all__ = ["ReadPart", "ShardReader", "assembled", "needed"]

ReadPart = Callable[[Sequence[StoredPart]], torch.Tensor]
"""Reads the first of these equal parts that is intact; raises ``DamagedError``."""


class ShardReader:
    """Reads from files, and from another copy where one is damaged."""

    def __init__(
        self, files: Mapping[int, Sequence[Path]], is_open: Mapping[Path, OpenShard] = MappingProxyType({})
    ) -> None:
        """``files`` has the copies of each rank's shard, the preferred ones first; some may be open."""
        self._files, self._open = files, is_open
        self._entries: dict[Path, dict[str, Entry]] = {}
        self.problems: list[str] = []
        """Damage that was found, also where another copy could be read."""

    def __call__(self, copies: Sequence[StoredPart]) -> torch.Tensor:
        problems: list[str] = []
        for each in copies:
            for path in self._files.get(each.rank, ()):
                try:
                    entry = self._entry(path, each.entry)
                    read = self._open[path].tensor if path in self._open else partial(read_tensor, path)
                    tensor: torch.Tensor = read(entry)
                except CheckpointError as error:
                    problems.append(str(error))
                    continue
                self.problems += [each for each in problems if each not in self.problems]
                return tensor
        raise DamagedError("; ".join(problems) or f"there is no shard of rank {copies[0].rank}")

    def _entry(self, path: Path, wanted: Entry) -> Entry:
        """Where this file has the tensor: copies of a shard may be laid out differently."""
        if path not in self._entries:
            header = self._open[path].header if path in self._open else inspect(path)
            self._entries[path] = {each.name: each for each in header.entries}
        entry = self._entries[path].get(wanted.name)
        if entry is None or entry.digest != wanted.digest:
            raise DamagedError(f"{path}: it has no tensor {wanted.name!r} of the expected digest")
        return entry


def needed(whole: WholeTensor, target: Sequence[Part]) -> list[tuple[list[StoredPart], list[Shared]]]:
    """What has to be copied from which stored parts to fill the target."""
    found = []
    for copies in whole.distinct():
        common = [
            each
            for source in copies[0].parts
            for part in target
            if (each := shared(source, part)) is not None
        ]
        if common:
            found.append((copies, common))
    return found


def assembled(
    whole: WholeTensor, target: Sequence[Part], shape: Sequence[int], read: ReadPart
) -> torch.Tensor:
    """A local tensor of this shape, filled with its parts of the whole; raises ``DamagedError``."""
    made = empty_tensor(whole.dtype, shape)
    for copies, common in needed(whole, target):
        source = read(copies)
        for each in common:
            fill(made[each.target], source[each.source])
    return made
