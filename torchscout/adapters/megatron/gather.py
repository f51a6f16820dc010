"""Megatron-Core's ``overlap_param_gather``: parameters that the next forward pass gathers (paper, section 9).

Only this module uses its private attributes. In a release without them these parameters are not watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from torchscout.decision.types import Surface

__all__ = ["LATE", "gathered_among", "gathers_late", "own_parts", "ungathered"]

LATE = "overlap_param_gather writes it in the forward pass, and it is watched from then on"
_PRIVATE = ("buckets", "param_gather_dispatched", "param_gather_handle")
_PLACE = ("intra_distributed_optimizer_instance_size", "intra_distributed_optimizer_instance_rank")


def gathers_late(chunk: Any) -> bool:
    """Whether parameters are gathered in the next forward pass."""
    config = chunk.ddp_config
    return isinstance(chunk, DistributedDataParallel) and bool(
        config.use_distributed_optimizer and config.overlap_param_gather
    )


def ungathered(chunk: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that have not been gathered yet."""
    gathered = {
        id(parameter)
        for group in _groups(chunk)
        if all(hasattr(group, each) for each in _PRIVATE)
        and group.param_gather_dispatched
        and group.param_gather_handle is None
        for bucket in group.buckets
        for parameter in bucket.params
    }
    return [each for each in chunk.parameters() if id(each) not in gathered]


def gathered_among(chunk: Any) -> frozenset[int]:
    """The ranks with which the forward pass of this chunk communicates to gather parameters."""
    groups = [getattr(each, "intra_distributed_optimizer_instance_group", None) for each in _groups(chunk)]
    members = (dist.get_process_group_ranks(each) for each in groups if each is not None)
    return frozenset(rank for ranks in members for rank in ranks)


def own_parts(chunks: Sequence[DistributedDataParallel]) -> dict[Surface, torch.Tensor]:
    """This rank's contribution to the gather of parameters, which the update has written."""
    return {
        f"model.{number}.bucket.{place}/own": part
        for number, chunk in enumerate(chunks)
        for place, part in enumerate(_own_parts(chunk))
    }


def _own_parts(chunk: DistributedDataParallel) -> Iterator[torch.Tensor]:
    for group in _groups(chunk):
        if all(hasattr(group, each) for each in (*_PRIVATE, *_PLACE)):
            size, rank = (getattr(group, each) for each in _PLACE)
            for bucket in group.buckets:
                if bucket.param_data is not None:
                    # ``data`` has its own version counter: gathering counts as a write to the whole bucket.
                    yield bucket.param_data.data.chunk(size)[rank]


def _groups(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
