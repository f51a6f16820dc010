"""Lets the real Megatron-Core train on CPU: import this in a rank of its own, and call ``work_around``.

Only entry points of ``torch.cuda`` are redirected, and factories that are called with ``device="cuda"``.
``python -m evaluation.jobs.megatron_cpu SCRIPT`` runs a script that way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import runpy
import sys
import time
import types
from typing import Any

import torch
import torch._dynamo
import torch.cuda.random
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


class _Generators(list):
    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


class _OnCpu(TorchFunctionMode):
    """Keep tensors on the CPU that are to go to a GPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.device and _is_cuda(args[0]):
            return _CPU
        if function is torch.Tensor.to:
            args = tuple("cpu" if place and _is_cuda(each) else each for place, each in enumerate(args))
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    named = isinstance(device, str) and device.startswith("cuda")
    return named or (isinstance(device, torch.device) and device.type == "cuda")


def _redirect() -> None:
    cuda: Any = torch.cuda
    current = _Stream()
    properties = types.SimpleNamespace(
        major=9, minor=0, total_memory=1 << 34, multi_processor_count=1, name=""
    )
    for name, value in {
        "current_device": "cpu",
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "device_count": 1,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "current_stream": current,
        "default_stream": current,
        "manual_seed_all": None,
        "_lazy_init": None,
    }.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.default_generators = _Generators([torch.default_generator])
    cuda._lazy_call = lambda call, **_: call()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    for kind in ("Float", "Long", "Int", "Byte", "Half", "BFloat16", "Double", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _keep_tensors() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda *_: None
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    plain = tensor.type

    def type_on_cpu(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Megatron asserts that a tensor says it is CUDA's."""
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.").replace("cuda.cuda.", "cuda.")
        return plain(self, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **kwargs)

    tensor.type = type_on_cpu


@functools.cache
def work_around() -> None:
    """What Megatron-Core 0.16.1 itself lacks without Transformer Engine and CUDA."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    for each in (random, utils):  # they keep what they found in torch.cuda when they were imported
        each._lazy_call, each._lazy_init = torch.cuda._lazy_call, torch.cuda._lazy_init
    torch._dynamo.config.disable = True  # fused pointwise operations would be compiled for a GPU
    # On CPU there is one random stream for what a GPU has two for.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(mcore_fsdp_adapter.TELinear, type):
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})  # Megatron-FSDP asks what is one
    _fuse()
    moved = moe_utils.maybe_move_tensor_to_cpu

    def numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        is_tensor = as_numpy and isinstance(tensor, torch.Tensor)
        return tensor.numpy() if is_tensor else moved(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = numbers


def _fuse() -> None:
    """Apex's kernel that adds a weight's gradient to ``main_grad`` by itself."""
    from megatron.core.tensor_parallel import layers

    def accumulate(given: torch.Tensor, gradient: torch.Tensor, into: torch.Tensor) -> None:
        into.add_(gradient.t().matmul(given))

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )


_redirect()
_keep_tensors()
_OnCpu().__enter__()

if __name__ == "__main__":
    work_around()
    runpy.run_path(sys.argv[1], run_name="__main__")
