"""Writes a generation as a checkpoint of ``torch.distributed.checkpoint`` (DCP).

DCP's own planner and writer do it. Each part of a tensor is written as one chunk, as its rank held it, and
read when it is written, so that no more than a few parts are in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchscout.checkpoint.export import contents
from torchscout.checkpoint.reshard.parts import Part
from torchscout.checkpoint.reshard.reader import ReadPart
from torchscout.checkpoint.reshard.whole_state import StoredPart, WholeState, WholeTensor
from torchscout.state.layout import dtype_named

__all__ = ["write"]


def write(state: WholeState, read: ReadPart, folder: Path) -> None:
    """Write the model and the optimizers into a folder; raises ``DamagedError`` if a part is not intact."""
    values: dict[contents.Path, Any] = {
        ("model", name): whole for name, whole in contents.model_of(state, tied=True).items()
    }
    values |= {("optim", *path): each for path, each in contents.optimizer_of(state, read).items()}
    writer, planner = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1), _Planner(read)
    planner.set_up_planner({".".join(map(str, path)): each for path, each in values.items()})
    planner.mappings = {".".join(map(str, path)): path for path in values}
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writes = writer.write_data(plan, planner)
    writes.wait()
    writer.finish(metadata, [writes.value()])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One part of a tensor, in all the places where it is stored."""

    copies: list[StoredPart]
    part: Part


class _Planner(DefaultSavePlanner):
    """Plans to write values that are described, and reads them one after the other."""

    def __init__(self, read: ReadPart) -> None:
        super().__init__(flatten_state_dict=True)
        self._read = read
        self._chunks: dict[MetadataIndex, _Chunk] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: Any = None,  # noqa: ARG002  DCP's interface
        is_coordinator: bool = True,
    ) -> None:
        self.state_dict, self.is_coordinator = dict(state_dict), is_coordinator

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, WholeTensor):
                items += self._tensor(name, value)
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        # DCP has numbered the chunks of each tensor meanwhile.
        chunk = self._chunks.get(replace(write_item.index, index=None))
        if chunk is None:
            stream = io.BytesIO()
            torch.save(self.state_dict[write_item.index.fqn], stream)
            return stream
        part = chunk.part
        slices = tuple(slice(start, start + size) for start, size in zip(part.local, part.sizes, strict=True))
        return self._read(chunk.copies)[slices].contiguous()

    def _tensor(self, name: str, whole: WholeTensor) -> Iterator[WriteItem]:
        properties, size = TensorProperties(dtype=dtype_named(whole.dtype)), torch.Size(whole.shape)
        for copies in whole.distinct():
            for part in copies[0].parts:
                index = MetadataIndex(name, torch.Size(part.offsets))
                self._chunks[index] = _Chunk(copies, part)
                chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                data = TensorWriteData(chunk, properties, size)
                yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)
