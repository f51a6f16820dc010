"""Megatron-Core's distributed optimizer on CPU ranks: float32 shards, bfloat16 weights on every rank.

Megatron-Core wants CUDA. What it uses of it here is redirected: devices, and tensors moved to them.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.random
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from flip_parts.job import Work
from flip_parts.layouts import ROWS, batch, leave_groups, slots

VOCABULARY, LENGTH = 64, 16


class _OnCpu(TorchFunctionMode):
    """What is to go to a GPU stays."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@functools.cache
def _stay_on_cpu() -> None:
    cuda: Any = torch.cuda
    memory = types.SimpleNamespace(total_memory=1 << 34, major=9, minor=0, multi_processor_count=1, name="")
    for name, value in {
        "current_device": "cpu",
        "set_device": None,
        "synchronize": None,
        "device_count": 1,
        "get_device_properties": memory,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "_lazy_init": None,
    }.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.default_generators = {"cpu": torch.default_generator}
    cuda._lazy_call = lambda call, **_: call()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    for kind in ("Float", "Long", "Int", "Byte", "Half", "BFloat16", "Double", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    plain = tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Megatron asserts that the type of a tensor is one of CUDA's."""
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.").replace("cuda.cuda.", "cuda.")
        return plain(self, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **kwargs)

    tensor.type = named
    torch._dynamo.config.disable = True  # fused operations would be compiled for a GPU
    _OnCpu().__enter__()


def distributed_optimizer(rank: int) -> Work:
    warnings.filterwarnings("ignore")
    _stay_on_cpu()
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    random._lazy_call, random._lazy_init = torch.cuda._lazy_call, torch.cuda._lazy_init
    parallel_state.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=distributed.finalize_model_grads,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    setup = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=4000
    )
    chunk = distributed.DistributedDataParallel(config, setup, Float16Module(config, model))
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=1e-3, **settings), [chunk])
    members = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    places, mask = torch.arange(LENGTH).expand(ROWS, -1), torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    def step(number: int, now: Callable[[str], None]) -> None:
        tokens = batch(number, rank, VOCABULARY, LENGTH)
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        now("before forward")
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = chunk(inputs, places, mask, labels=targets).float().mean()
        now("before backward")
        loss.backward()
        distributed.finalize_model_grads([chunk])
        now("before the update")
        optimizer.step()

    def held() -> dict[str, list[torch.Tensor]]:
        inner = [each.optimizer for each in members]
        return {
            "master": [part for each in inner for group in each.param_groups for part in group["params"]],
            "exp_avg": [slot for each in inner for slot in slots(each, "exp_avg")],
            "exp_avg_sq": [slot for each in inner for slot in slots(each, "exp_avg_sq")],
            "working copy": [*chunk.parameters()],
        }

    def leave() -> None:
        parallel_state.destroy_model_parallel()
        leave_groups()

    assert dist.is_initialized()
    return Work(([chunk], optimizer), held, step, leave)
