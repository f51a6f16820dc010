"""The shapes and kernels that ``scout discover`` executes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from torchscout.experts.catalog import Catalog, Places
from torchscout.experts.coverage import Observed, Rows, Table, tabulated, uniform
from torchscout.experts.discovery import Executions, discover
from torchscout.experts.templates import Routed, Routings, first_shapes, routed

if TYPE_CHECKING:
    from torch import nn

    from torchscout.experts.coverage import Profiler
    from torchscout.experts.routing import Loads

__all__ = [
    "KERNELS",
    "REGIMES",
    "DiscoveryPlan",
    "Kernel",
    "Listener",
    "discovered",
    "kernel_loads",
    "kernels_of",
    "layers_in",
    "rows_in",
]

KERNELS = ("triton", "torch")
REGIMES = ("pressure", "waves")
_MOST_ROWS, _MOST_LAYERS = 1_000_000, 10_000


@dataclass(frozen=True, slots=True)
class DiscoveryPlan:
    """The experts of a model, and their admitted shapes."""

    rows: tuple[int, ...]
    """Row counts to admit, the same for every expert of the kernel."""
    domain: str
    """The row counts as given on the command line."""
    hidden: int
    intermediate: int
    experts: int
    layers: tuple[str, ...]
    positions: int
    kernel: str
    module: str | None
    """A function that returns the module to execute instead, ``package.module:function``."""
    regime: str
    device: str
    programs: int | None
    """Programs of the kernel; None for one on each multiprocessor."""
    routings: Routings | None
    """Admitted distributions of rows over a kernel's experts; None if only uniform shapes are admitted."""

    @property
    def shapes(self) -> list[Rows]:
        return [uniform(rows, self.experts) for rows in self.rows]

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Features of the up and down projections; only one if they are equal."""
        return tuple(dict.fromkeys([(self.hidden, self.intermediate), (self.intermediate, self.hidden)]))


def rows_in(text: str) -> tuple[int, ...]:
    """Parse row counts: ranges such as ``1:2048``, both included, and numbers, separated by commas."""
    found: set[int] = set()
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        if not first.isdigit() or (colon and not last.isdigit()):
            raise ValueError(f"must be row counts such as 1:2048 or 0,1,128, got {part!r}")
        begin, end = int(first), int(last or first)
        if end < begin:
            raise ValueError(f"a range must not end before it begins, got {part!r}")
        if end - begin >= _MOST_ROWS:
            raise ValueError(f"at most {_MOST_ROWS} row counts can be executed, got {part!r}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def layers_in(text: str) -> tuple[str, ...]:
    """Parse a number of layers, or their names, separated by commas."""
    if text.isdigit():
        if not 0 < int(text) <= _MOST_LAYERS:
            raise ValueError(f"must be 1 to {_MOST_LAYERS} layers, got {text}")
        return tuple(f"layer.{number}" for number in range(int(text)))
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"must be a number of layers, or different names, got {text!r}")
    return names


@dataclass(frozen=True, slots=True)
class Kernel:
    """One projection, or one whole expert, that can be executed and profiled."""

    name: str
    profiler: Profiler
    loads: Loads


def kernels_of(plan: DiscoveryPlan) -> list[Kernel]:
    """The kernels of a plan. Raises ``ValueError`` if this machine cannot run them."""
    try:
        return _kernels(plan)
    except (MemoryError, RuntimeError) as error:  # what torch raises if memory does not suffice
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the experts cannot be created on {plan.device}: {first}") from error


def _kernels(plan: DiscoveryPlan) -> list[Kernel]:
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
    """For each pass, the work items that add up to all tiles: last tiles, and tiles that follow another."""
    from torchscout.experts.kernel.work_items import Pass, WorkItem

    turns = (WorkItem.LAST_TILE.word, WorkItem.FOLLOWING_TILE.word)
    return {each.word: tuple(f"{each.word}/{turn}" for turn in turns) for each in Pass}


def _plain_expert(plan: DiscoveryPlan) -> Kernel:
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


def _made(text: str) -> nn.Module:
    """The module that the user's function returns. Raises ``ValueError`` if that is not an expert module."""
    from torch import nn

    path, colon, name = text.partition(":")
    if not colon:
        raise ValueError(f"must be package.module:function, got {text!r}")
    sys.path.insert(0, str(Path.cwd()))  # as when Python runs a script from here
    try:
        module = getattr(importlib.import_module(path), name)()
    except Exception as error:  # a user's module and function may raise anything
        raise ValueError(f"{text!r} fails: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{text!r} returns a {type(module).__name__}, not a torch.nn.Module")
    if next(module.parameters(), None) is None:
        raise ValueError(f"{text!r} returns a module without parameters; experts have some")
    return module


class Listener(Protocol):
    """Receives the progress of a discovery."""

    def begin(self, kernel: str, shapes: int) -> None:
        """Called before the first of ``shapes`` shapes."""
        ...

    def show(self, seen: Observed) -> None:
        """Called after each shape."""
        ...


def discovered(plan: DiscoveryPlan, kernels: Sequence[Kernel], folder: Path, listener: Listener) -> Catalog:
    """Discover the whole catalog. Logs of executed shapes in ``folder`` must be of the same facts."""
    tables: list[Table] = []
    gaps: list[str] = []
    for kernel in kernels:
        log = folder / f"{kernel.name.replace(' ', '-')}.jsonl"
        listener.begin(kernel.name, len(plan.rows))
        seen = discover(kernel.profiler, plan.shapes, on_progress=listener.show, resume_from=log)
        tables.append(tabulated(kernel.name, kernel.profiler.facts(), _domain(plan), seen))
        if plan.routings is not None:
            found = _routed(kernel, plan.routings, log, listener)
            if found.table is None:
                gaps.append(f"{plan.routings}, {kernel.name}: {found.reason}")
            else:
                tables.append(found.table)
    places = Places(plan.layers, plan.experts, plan.positions, tuple(range(len(tables))))
    return Catalog(tuple(tables), (places,), tuple(gaps))


def _routed(kernel: Kernel, admitted: Routings, log: Path, listener: Listener) -> Routed:
    listener.begin(f"{kernel.name}, routings", len(first_shapes(admitted)))
    return routed(
        kernel.name,
        kernel.profiler.facts(),
        kernel.loads,
        admitted,
        executions=Executions(kernel.profiler, log),
        on_progress=listener.show,
    )


def _domain(plan: DiscoveryPlan) -> str:
    each = "" if plan.experts == 1 else f" for each of {plan.experts} experts"
    return f"{plan.domain} rows{each}"
