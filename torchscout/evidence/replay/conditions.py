"""The conditions of a replayed call: autocast as in training, deterministic kernels (paper, 6.1.1)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["autocast_as", "autocast_now", "deterministic", "is_compiled"]


def autocast_now(device: torch.device) -> dict[str, str | None]:
    """For the CPU and the accelerator: the dtype that autocast uses, None where it is off."""
    return {
        kind: _name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device.type))
    }


@contextmanager
def autocast_as(dtypes: Mapping[str, str | None]) -> Iterator[None]:
    with ExitStack() as contexts:
        for kind, dtype in dtypes.items():
            # Without its cache: a weight cast before the update would be used after it.
            chosen = None if dtype is None else getattr(torch, dtype)
            autocast = torch.autocast(kind, dtype=chosen, enabled=dtype is not None, cache_enabled=False)
            contexts.enter_context(autocast)
        yield


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or a part of it, runs as compiled code."""
    # Whoever compiled something has imported the compiler; importing it costs seconds.
    compiler = sys.modules.get("torch._dynamo")
    wrapper: type[nn.Module] | tuple[()] = () if compiler is None else compiler.OptimizedModule
    return any(isinstance(each, wrapper) or each._compiled_call_impl is not None for each in module.modules())


@contextmanager
def deterministic() -> Iterator[None]:
    """Let kernels repeat themselves where they can; every switch is put back.

    Not around compiled code: the mode is one of its guards, and other kernels would be compiled.
    """
    # Not torch.use_deterministic_algorithms: it imports the compiler, and sets the compiler's switch too.
    switch: Any = torch._C._set_deterministic_algorithms
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        with warnings.catch_warnings():
            # Of kernels that have no deterministic version: a second replay finds out about them.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            switch(True, warn_only=True)
            memory.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        switch(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
