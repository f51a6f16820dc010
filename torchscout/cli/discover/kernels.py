"""The profilers that a plan asks for. Torch and Triton are imported here, not before."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from torchscout.cli.discover.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from torchscout.experts.coverage import Profiler
    from torchscout.experts.routing import Loads

__all__ = ["Kernel", "kernel_loads", "kernels_of"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One projection, or one whole expert, that can be executed and looked at."""

    name: str
    profiler: Profiler
    loads: Loads


def kernels_of(plan: Plan) -> list[Kernel]:
    """A ``ValueError`` where this machine cannot run them."""
    try:
        return _kernels(plan)
    except (MemoryError, RuntimeError) as error:  # what torch says to sizes for which there is no memory
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the experts cannot be made on {plan.device}: {first}") from error


def _kernels(plan: Plan) -> list[Kernel]:
    if plan.kernel == "torch":
        return [_plain_expert(plan)]
    try:
        from torchscout.experts.kernel.profiler import KernelProfiler
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("the kernel that counts its paths needs Triton: pip install triton") from error
    regime = cast(Literal["pressure", "waves"], plan.regime)
    loads = kernel_loads()
    return [
        Kernel(
            f"{inner}x{outer}",
            KernelProfiler(
                inner, outer, plan.experts, device=plan.device, regime=regime, programs=plan.programs
            ),
            loads,
        )
        for inner, outer in plan.projections
    ]


def kernel_loads() -> Loads:
    """Programs have as many last tiles as first ones, and all others follow one: together, all tiles."""
    from torchscout.experts.kernel.work_items import Pass, WorkItem

    turns = (WorkItem.LAST_TILE.word, WorkItem.FOLLOWING_TILE.word)
    return {each.word: tuple(f"{each.word}/{turn}" for turn in turns) for each in Pass}


def _plain_expert(plan: Plan) -> Kernel:
    from torch import bfloat16, nn

    from torchscout.experts.launch_profiler import LaunchProfiler

    if plan.module is not None:
        grouped = plan.experts > 1
        profiler = LaunchProfiler(_made(plan.module), plan.hidden, device=plan.device, grouped=grouped)
        return Kernel(plan.module, profiler, {})
    up = nn.Linear(plan.hidden, plan.intermediate, bias=False, dtype=bfloat16)
    down = nn.Linear(plan.intermediate, plan.hidden, bias=False, dtype=bfloat16)
    profiler = LaunchProfiler(nn.Sequential(up, nn.SiLU(), down), plan.hidden, device=plan.device)
    return Kernel(f"{plan.hidden}x{plan.intermediate} and back", profiler, {})


def _made(told: str) -> nn.Module:
    """What the user's function gives; a ``ValueError`` says what is wrong with it."""
    from torch import nn

    path, colon, name = told.partition(":")
    if not colon:
        raise ValueError(f"package.module:function, got {told!r}")
    sys.path.insert(0, str(Path.cwd()))  # as when Python runs a script from here
    try:
        module = getattr(importlib.import_module(path), name)()
    except Exception as error:  # a user's module and function may raise anything
        raise ValueError(f"{told!r} cannot be had: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{told!r} gives a {type(module).__name__}, and not a torch.nn.Module")
    if next(module.parameters(), None) is None:
        raise ValueError(f"{told!r} gives a module without parameters; experts have some")
    return module
