"""Lets the real TorchTitan 0.3.0 train on CPUs with Gloo and PyTorch 2.13; to be imported before it.

Importing this changes nothing of PyTorch for other tests, whose ranks may come from the same server.

TorchTitan's own code stays as it is. It expects an accelerator and a PyTorch newer than 2.13.
"""

from __future__ import annotations

import inspect
import types
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring


class _Device(types.ModuleType):
    """The CPU, as an accelerator's module would describe it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, _: object) -> None: ...

    def synchronize(self, *_: object) -> None: ...

    def reset_peak_memory_stats(self, *_: object) -> None: ...

    def empty_cache(self) -> None: ...

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, _: object = None) -> str:
        return "CPU"

    def get_device_properties(self, _: object = None) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34, name="CPU", multi_processor_count=1)

    def memory_stats(self, _: object = None) -> dict[str, int]:
        return {}


def _set_divide_factor(self: FSDPModule, factor: float) -> None:
    _divide_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sum


def _with_microbatches(kind: type) -> None:
    """The newer ``step`` takes microbatches that are split already."""
    original, absent = kind.step, object()
    if "arg_mbs" in inspect.signature(original).parameters:
        return  # by PyTorch, or by an earlier call

    def step(
        self: Any,
        *args: Any,
        arg_mbs: Any = absent,
        kwarg_mbs: Any = absent,
        target_mbs: Any = None,
        **kw: Any,
    ) -> Any:
        if arg_mbs is absent and kwarg_mbs is absent:
            return original(self, *args, **kw)
        count, run = self._n_microbatches, self._step_microbatches
        inputs = [()] * count if arg_mbs in (None, absent) else arg_mbs
        named = [{}] * count if kwarg_mbs in (None, absent) else kwarg_mbs
        self._split_inputs = lambda *_: (inputs, named)
        self._step_microbatches = lambda args, kwargs, _=None, *rest, **named: run(
            args, kwargs, target_mbs, *rest, **named
        )
        try:
            return original(self, **kw)
        finally:
            del self._split_inputs, self._step_microbatches

    kind.step = step


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _ring_forward(_op: Any, args: Any, kwargs: Any) -> Any:
    query, given = args[0], [_local(each) for each in args]
    outputs = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        2,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        query=given[0],
        key=given[1],
        value=given[2],
        dropout_p=given[3] if len(given) > 3 else 0.0,
        is_causal=given[4] if len(given) > 4 else False,
        scale=kwargs.get("scale"),
    )
    return _spread(outputs[:2], query)


def _ring_backward(_op: Any, args: Any, kwargs: Any) -> Any:
    arriving, given = args[0], [_local(each) for each in args]
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    outputs = ring._templated_ring_attention_backward(
        arriving.device_mesh.get_group(),
        2,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad_out_name="grad_out",
        scale=kwargs.get("scale"),
        **dict(zip(names, given, strict=False)),
    )
    return _spread(outputs[:3], arriving)


def _spread(tensors: Any, like: DTensor) -> Any:
    return tuple(
        DTensor.from_local(each, like.device_mesh, like.placements, run_check=False) for each in tensors
    )


def prepare() -> None:
    """In a rank that is going to train: what is changed of PyTorch is changed there alone."""
    FSDPModule.set_gradient_divide_factor = _set_divide_factor
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: dist.distributed_c10d._set_pg_timeout(timeout, group)
    for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        _with_microbatches(each)
    aten = torch.ops.aten
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _ring_forward
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _ring_backward


_divide_factor = FSDPModule.set_gradient_divide_factor
with (
    patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"),
    patch.object(torch._utils, "_get_device_module", lambda _: _Device("titan_cpu_device")),
):
    import torchtitan.tools.utils  # noqa: F401  asks for the device once, when it is imported
