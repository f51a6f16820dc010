"""Megatron-FSDP: sharded parameters (paper, section 9).

Only this module uses its private functions, and ``obstacle_of`` checks that they exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.distributed import FullyShardedDataParallel

from torchscout.adapters.modules import without_hooks
from torchscout.adapters.versions import TESTED, missing
from torchscout.decision.types import Surface
from torchscout.utils.text import listed

__all__ = ["Gatherer", "copies_of", "obstacle_of", "room_for", "scatter", "show_shards"]

_PACKAGE = "megatron.core.distributed.fsdp."
"""The package whose hooks gather parameters before a pass."""
_STRATEGY = "optim_grads_params"
_PRIVATE = (
    "_replace_param_with_distributed_if_needed",
    "_replace_param_with_raw_if_needed",
    "all_gather_and_wait_parameters_ready",
    "all_gather_pipeline.wait_bucket_ready",
    "synchronize_param_gather",
)


def obstacle_of(chunk: FullyShardedDataParallel) -> str | None:
    """Why a chunk cannot be replayed, as the end of a sentence; None if it can."""
    strategy = chunk.ddp_config.data_parallel_sharding_strategy
    if strategy != _STRATEGY:
        return f"with the strategy {strategy}; it is with {_STRATEGY}"
    if not chunk.ddp_config.use_distributed_optimizer:
        return "without the distributed optimizer"
    if getattr(chunk.config, "num_moe_experts", None) is not None:
        return "with experts"
    if lacking := [*missing({}, ((chunk.module, each) for each in _PRIVATE))]:
        return f"without {listed(lacking)}, which {TESTED['megatron-core']} has"
    return None


def show_shards(chunk: FullyShardedDataParallel) -> None:
    """Make the module's parameters this rank's shards, as they are before the first step.

    After the optimizer's step Megatron-FSDP shows full parameters, most of them without memory. A gather for
    the next pass continues.
    """
    chunk.module._replace_param_with_distributed_if_needed()


def scatter(chunk: FullyShardedDataParallel) -> None:
    """Free parameters that are gathered or are being gathered for the next pass."""
    pipeline = chunk.module.all_gather_pipeline
    for bucket in range(pipeline.num_buckets):
        pipeline.wait_bucket_ready(bucket, False, empty_ok=True)
    chunk.module.synchronize_param_gather()


def copies_of(chunks: Sequence[FullyShardedDataParallel]) -> dict[Surface, torch.Tensor]:
    """This rank's shards of the parameters that are lower-precision copies of what the optimizer updates."""
    return {
        f"model.{number}.bucket.{place}/weights": bucket.model_weight_buffer.data
        for number, chunk in enumerate(chunks)
        for place, bucket in enumerate(chunk.param_and_grad_buffer.parameter_groups)
        if bucket.main_weight_buffer is not None
    }


def room_for(parameter: Any) -> torch.Tensor:
    """Memory for a gradient, which exists only while it is computed."""
    return torch.empty_like(parameter, dtype=parameter._gbuf.dtype)


class Gatherer:
    """Gathers the parameters of one module.

    Megatron-FSDP's own hooks are removed meanwhile: they would gather too, prefetch, and reduce gradients.
    """

    def __init__(self, chunk: FullyShardedDataParallel, module: torch.nn.Module) -> None:
        self._chunk, self._module, self._undo = chunk, module, ExitStack()

    def unshard(self) -> None:
        sharded = self._chunk.module
        self._undo.callback(scatter, self._chunk)
        sharded._replace_param_with_raw_if_needed()
        sharded.all_gather_and_wait_parameters_ready([*self._module.parameters()], prefetch=False)
        self._undo.enter_context(without_hooks(self._module, _is_from_fsdp))

    def reshard(self) -> None:
        self._undo.close()


def _is_from_fsdp(_: int, hook: Any) -> bool:
    return str(getattr(hook, "func", hook).__module__).startswith(_PACKAGE)
