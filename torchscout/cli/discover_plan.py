"""What ``scout discover`` executes, and with which profilers."""

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
    from torchscout.experts.templates import Routings

__all__ = [
    "KERNELS",
    "REGIMES",
    "Audience",
    "DiscoveryPlan",
    "Kernel",
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
    """The experts of a model, and the shapes they may be given."""

    rows: tuple[int, ...]
    """Row counts to admit, the same for every expert of the kernel."""
    domain: str
    """The same, as the user said it."""
    hidden: int
    intermediate: int
    experts: int
    layers: tuple[str, ...]
    positions: int
    kernel: str
    module: str | None
    """Where to get the expert module whose kernels run instead, ``package.module:function``."""
    regime: str
    device: str
    programs: int | None
    """Of the kernel; None for one on each multiprocessor."""
    routings: Routings | None
    """Rows that a kernel's experts share in any way; None if only uniform shapes are admitted."""

    @property
    def shapes(self) -> list[Rows]:
        return [uniform(rows, self.experts) for rows in self.rows]

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Up and down; one will do if they are alike."""
        return tuple(dict.fromkeys([(self.hidden, self.intermediate), (self.intermediate, self.hidden)]))


def rows_in(told: str) -> tuple[int, ...]:
    """``1:2048``, both included, or single numbers, or several of either with commas between them."""
    found: set[int] = set()
    for part in told.split(","):
        first, colon, last = part.strip().partition(":")
        if not first.isdigit() or (colon and not last.isdigit()):
            raise ValueError(f"row counts such as 1:2048 or 0,1,128, got {part!r}")
        begin, end = int(first), int(last or first)
        if end < begin:
            raise ValueError(f"a range goes from fewer rows to more, got {part!r}")
        if end - begin >= _MOST_ROWS:
            raise ValueError(f"at most {_MOST_ROWS} row counts are executed, got {part!r}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def layers_in(told: str) -> tuple[str, ...]:
    """A number of layers, or their names with commas between them."""
    if told.isdigit():
        if not 0 < int(told) <= _MOST_LAYERS:
            raise ValueError(f"1 to {_MOST_LAYERS} layers, got {told}")
        return tuple(f"layer.{number}" for number in range(int(told)))
    names = tuple(name.strip() for name in told.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"a number of layers, or different names, got {told!r}")
    return names


@dataclass(frozen=True, slots=True)
class Kernel:
    """One projection, or one whole expert, that can be executed and looked at."""

    name: str
    profiler: Profiler
    loads: Loads


def kernels_of(plan: DiscoveryPlan) -> list[Kernel]:
    """A ``ValueError`` where this machine cannot run them."""
    try:
        return _kernels(plan)
    except (MemoryError, RuntimeError) as error:  # what torch says to sizes for which there is no memory
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the experts cannot be made on {plan.device}: {first}") from error


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
    """Programs have as many last tiles as first ones, and all others follow one: together, all tiles."""
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


class Audience(Protocol):
    """Whoever watches."""

    def begin(self, what: str, shapes: int) -> None:
        """Before the first of so many shapes."""
        ...

    def show(self, seen: Observed) -> None:
        """After each of them."""
        ...


def discovered(plan: DiscoveryPlan, kernels: Sequence[Kernel], folder: Path, audience: Audience) -> Catalog:
    """The whole catalog; journals in ``folder`` keep what was executed, and must be of the same facts."""
    tables: list[Table] = []
    gaps: list[str] = []
    for kernel in kernels:
        journal = folder / f"{kernel.name.replace(' ', '-')}.jsonl"
        audience.begin(kernel.name, len(plan.rows))
        seen = discover(kernel.profiler, plan.shapes, on_progress=audience.show, resume_from=journal)
        tables.append(tabulated(kernel.name, kernel.profiler.facts(), _domain(plan), seen))
        if plan.routings is not None:
            found = _routed(kernel, plan.routings, journal, audience)
            if found.table is None:
                gaps.append(f"{plan.routings}, {kernel.name}: {found.reason}")
            else:
                tables.append(found.table)
    places = Places(plan.layers, plan.experts, plan.positions, tuple(range(len(tables))))
    return Catalog(tuple(tables), (places,), tuple(gaps))


def _routed(kernel: Kernel, admitted: Routings, journal: Path, audience: Audience) -> Routed:
    audience.begin(f"{kernel.name}, routings", len(first_shapes(admitted)))
    return routed(
        kernel.name,
        kernel.profiler.facts(),
        kernel.loads,
        admitted,
        executions=Executions(kernel.profiler, journal),
        on_progress=audience.show,
    )


def _domain(plan: DiscoveryPlan) -> str:
    each = "" if plan.experts == 1 else f" for each of {plan.experts} experts"
    return f"{plan.domain} rows{each}"
