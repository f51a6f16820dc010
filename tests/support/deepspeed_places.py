"""Where ranks are, as DeepSpeed has it and as SCOUT reads it; and how one job makes room for the next."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from torchscout.adapters.deepspeed import DeepSpeedAdapter
from torchscout.collectives.call import SCOUT_GROUP
from torchscout.mesh import LayerKind

__all__ = ["ours", "theirs", "tidy_up"]

_SPREADS = {"mixture": 2, "uneven": 2, "one_each": 4}
"""Over how many ranks experts are, by kind."""
_LINEAR = torch.nn.functional.linear
Places = dict[str, list[int]]
"""Who is along which axis of this rank's; ``holders`` have the same experts."""


def theirs(kind: str, engine: Any) -> Places:
    """Of process groups that DeepSpeed communicates in."""
    found = {"replica": engine.seq_data_parallel_group}
    if kind == "pipeline":
        found = {
            "replica": engine.grid.get_data_parallel_group(),
            "pipeline": engine.grid.get_pipe_parallel_group(),
        }
    if kind == "ulysses":
        found = {
            "replica": groups._get_data_parallel_group(),
            "context": groups._get_sequence_parallel_group(),
        }
    if kind == "tensor":
        found = {
            "replica": groups.get_data_parallel_group(),
            "tensor": groups.get_tensor_model_parallel_group(),
        }
    if kind in _SPREADS:
        name = f"ep_size_{_SPREADS[kind]}"
        found |= {
            "expert": groups._get_expert_parallel_group(name),
            "holders": groups._get_expert_data_parallel_group(name),
        }
    return {axis: sorted(dist.get_process_group_ranks(group)) for axis, group in found.items()}


def ours(kind: str, engine: Any) -> Places:
    rank, mesh = dist.get_rank(), DeepSpeedAdapter(engine, None).mesh(["here"] * dist.get_world_size())
    data = "shard" if engine.zero_optimization_stage() == 3 else "replica"
    axes = {"pipeline": ["pipeline"], "ulysses": ["context"], "tensor": ["tensor"]}.get(kind, [])
    found = {"replica": mesh.ranks_along(data, rank, LayerKind.DENSE)}
    found |= {axis: mesh.ranks_along(axis, rank, LayerKind.DENSE) for axis in axes}
    if kind in _SPREADS:
        found["expert"] = mesh.ranks_along("expert", rank, LayerKind.EXPERT)
        found["holders"] = mesh.ranks_along("replica", rank, LayerKind.EXPERT)
    return {axis: sorted(ranks) for axis, ranks in found.items()}


def tidy_up() -> None:
    """Let another engine begin as if it were the first of this process."""
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()
    set_autotp_mode(training=False)
    torch.nn.functional.linear = _LINEAR  # in whose place ZeRO 3 leaves one that adds up in another order
    groups._release_process_group_references()
    # PyTorch names a group that only its members make after the number of groups they are in already: ranks
    # that were of different stages would not find each other in the next trial.
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)
