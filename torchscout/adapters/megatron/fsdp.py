"""Megatron-FSDP: parameters that ``adapters.megatron.adapter`` finds in shards (paper, section 9).

What is private of it is used here alone, and ``obstacle_of`` looks whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.distributed import FullyShardedDataParallel

from torchscout.decision.record import Surface

__all__ = ["Keeper", "copies_of", "obstacle_of", "room_for", "scatter", "show_shards"]

_PACKAGE = "megatron.core.distributed.fsdp."
"""Whose hooks gather parameters before a pass."""
_STRATEGY = "optim_grads_params"
_PRIVATE = ("_replace_param_with_distributed_if_needed", "_replace_param_with_raw_if_needed")


def obstacle_of(chunk: FullyShardedDataParallel) -> str | None:
    """With what, or in which version, replay would not be right."""
    strategy = chunk.ddp_config.data_parallel_sharding_strategy
    if strategy != _STRATEGY:
        return f"with the strategy {strategy}; it is with {_STRATEGY}"
    if not chunk.ddp_config.use_distributed_optimizer:
        return "without the distributed optimizer"
    if getattr(chunk.config, "num_moe_experts", None) is not None:
        return "with experts"
    if not all(hasattr(chunk.module, each) for each in _PRIVATE):
        return "in this version of it; that of megatron-core 0.16 is"
    return None


def show_shards(chunk: FullyShardedDataParallel) -> None:
    """Let the module's parameters be what this rank holds of them, as they are before the first step.

    Once the optimizer has stepped, Megatron-FSDP shows whole ones, most of them without memory. What is being
    gathered for the next pass stays.
    """
    chunk.module._replace_param_with_distributed_if_needed()


def scatter(chunk: FullyShardedDataParallel) -> None:
    """Let go of what is gathered, and of what is being gathered for the next pass."""
    pipeline = chunk.module.all_gather_pipeline
    for bucket in range(pipeline.num_buckets):
        pipeline.wait_bucket_ready(bucket, False, empty_ok=True)
    chunk.module.synchronize_param_gather()


def copies_of(chunks: Sequence[FullyShardedDataParallel]) -> dict[Surface, torch.Tensor]:
    """This rank's shards of what is gathered, where that is a copy in lower precision of what is updated."""
    return {
        f"model.{number}.bucket.{place}/weights": bucket.model_weight_buffer.data
        for number, chunk in enumerate(chunks)
        for place, bucket in enumerate(chunk.param_and_grad_buffer.parameter_groups)
        if bucket.main_weight_buffer is not None
    }


def room_for(parameter: Any) -> torch.Tensor:
    """For a gradient, of which there is none but while it is computed."""
    return torch.empty_like(parameter, dtype=parameter._gbuf.dtype)


class Keeper:
    """Gathers the parameters of one module.

    Hooks of Megatron-FSDP would do so too, prefetch others, and reduce gradients: they are taken away
    meanwhile.
    """

    def __init__(self, chunk: FullyShardedDataParallel, module: torch.nn.Module) -> None:
        self._chunk, self._module, self._undo = chunk, module, ExitStack()

    def unshard(self) -> None:
        sharded = self._chunk.module
        self._undo.callback(scatter, self._chunk)
        sharded._replace_param_with_raw_if_needed()
        sharded.all_gather_and_wait_parameters_ready([*self._module.parameters()], prefetch=False)
        for each in self._module.modules():
            for registry in (each._forward_pre_hooks, each._forward_hooks):
                self._undo.callback(_refill, registry, registry.copy())
                for key in [key for key, hook in registry.items() if _is_its(hook)]:
                    del registry[key]

    def reshard(self) -> None:
        self._undo.close()


def _is_its(hook: Any) -> bool:
    return str(getattr(hook, "func", hook).__module__).startswith(_PACKAGE)


def _refill(registry: dict[int, Any], contents: Mapping[int, Any]) -> None:
    registry.clear()
    registry.update(contents)
