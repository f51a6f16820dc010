"""A discovery from its first shape to the catalog, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchscout.cli.discover.kernels import Kernel
from torchscout.cli.discover.plan import Plan
from torchscout.experts.catalog import Catalog, Places
from torchscout.experts.coverage import Observed, Table, tabulated
from torchscout.experts.discovery import Executions, discover
from torchscout.experts.templates import Routed, Routings, first_shapes, routed

__all__ = ["Audience", "discovered"]


class Audience(Protocol):
    """Whoever watches."""

    def begin(self, what: str, shapes: int) -> None:
        """Before the first of so many shapes."""
        ...

    def show(self, seen: Observed) -> None:
        """After each of them."""
        ...


def discovered(plan: Plan, kernels: Sequence[Kernel], folder: Path, audience: Audience) -> Catalog:
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


def _domain(plan: Plan) -> str:
    each = "" if plan.experts == 1 else f" for each of {plan.experts} experts"
    return f"{plan.domain} rows{each}"
