"""``scout discover``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from torchscout.cli.checkpoint.wording import counted, size_in_words, stacked, table
from torchscout.cli.console import made_folder, repeated, taking
from torchscout.cli.discover_plan import KERNELS, REGIMES, DiscoveryPlan, layers_in, rows_in
from torchscout.errors import CatalogError
from torchscout.experts.catalog import Catalog
from torchscout.experts.coverage import Observed, Table

if TYPE_CHECKING:
    from torchscout.cli.discover_plan import Kernel
    from torchscout.experts.templates import Routings

__all__ = ["Screen", "discover", "screen_of"]

_LINES = 10
"""Of progress for each kernel, where there is no terminal."""


_MOST = 5
"""Retained shapes that are named as they come, for each kernel; the table counts them all."""


class Screen:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._what, self._shapes, self._done, self._retained = "", 0, 0, 0

    def __enter__(self) -> Screen:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, shapes: int) -> None:
        self._what, self._shapes, self._done, self._retained = what, shapes, 0, 0
        if self._progress is not None:
            self._task = self._progress.add_task(what, total=shapes)

    def show(self, seen: Observed) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
        elif self._done == self._shapes or self._done % max(1, self._shapes // _LINES) == 0:
            self._say(f"{self._what}: {self._done} of {self._shapes} shapes")
        if seen.profile is None and self._retained < _MOST:
            self._retained += 1
            self._say(f"{self._what}: rows {_rows(seen.rows)} retained, {seen.reason:.200}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def screen_of(catalog: Catalog) -> str:
    """What was admitted, what stands for it, and what could not be compressed."""
    heads = ["projection", "shapes", "admitted", "selected", "reduction", "occurrences covered", "retained"]
    parts = [table(heads, [_figures(each) for each in catalog.tables])]
    reasons = [_because(each) for each in catalog.tables if each.retained]
    gaps = [f"Not covered: {gap}. Only uniform shapes are." for gap in catalog.gaps]
    return stacked([*parts, *reasons, *gaps])


def _figures(each: Table) -> list[str]:
    replayed = len(each.selected) + len(each.retained)
    return [
        each.name,
        each.domain,
        _number(each.admitted),
        str(len(each.selected)),
        f"{100 * (1 - replayed / each.admitted):.2f}%",
        f"{each.covered:,} of {each.occurrences:,}",
        str(len(each.retained)),
    ]


def _because(each: Table) -> str:
    kinds = Counter(retained.reason.partition(":")[0] for retained in each.retained)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    first = each.retained[0]
    shapes = counted(len(each.retained), "shape")
    return f"{each.name}: {shapes} retained ({told}), such as rows {_rows(first.rows)}, {first.reason:.300}"


def _rows(rows: tuple[int, ...]) -> str:
    return f"{rows[0]}" if len(set(rows)) == 1 else str(rows)


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**9 else f"{value:.2e}"


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `scout discover`."""

    rows: Annotated[str, typer.Option(help="Rows that an expert may get: 1:2048, both included, or 0,1,128.")]
    hidden: Annotated[int, typer.Option(help="Features that go into an expert and come out of it.")]
    intermediate: Annotated[int, typer.Option(help="Features between its two projections.")]
    experts: Annotated[int, typer.Option(help="Experts that one kernel executes together.")] = 1
    layers: Annotated[
        str,
        typer.Option(help="Names of the expert modules, a,b, in which * stands for anything; or a number."),
    ] = "*"
    positions: Annotated[int, typer.Option(help="Expert-parallel positions of each layer.")] = 1
    kernel: Annotated[
        str, typer.Option(help="triton, which counts its paths; or torch, whose paths are unknown.")
    ] = "triton"
    module: Annotated[
        str | None,
        typer.Option(help="Execute this instead: package.module:function, which gives the expert module."),
    ] = None
    regime: Annotated[
        str, typer.Option(help="What compared shapes share: pressure (idle or full), or exact waves.")
    ] = "pressure"
    device: Annotated[
        str | None, typer.Option(help="Where to execute; by default cuda if there is one, else cpu.")
    ] = None
    programs: Annotated[
        int | None, typer.Option(min=1, help="Programs of the kernel; by default one a multiprocessor.")
    ] = None
    heterogeneous: Annotated[
        bool, typer.Option("--heterogeneous", help="Also cover every routing of --tokens to the experts.")
    ] = False
    tokens: Annotated[int | None, typer.Option(help="Rows that the experts of one kernel get together.")] = (
        None
    )
    at_most: Annotated[bool, typer.Option("--at-most", help="Or fewer rows than --tokens.")] = False
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted discovery, to go on with it.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the catalog and nothing else.")] = False
    output: Annotated[Path | None, typer.Option(help="Write the catalog to a file.")] = None


@taking(Asked)
def discover(asked: Asked) -> None:
    """Execute every admitted expert shape and find the few that stand for all of them."""
    plan = _plan(asked)
    from torchscout.cli.discover_plan import kernels_of

    kernels = _or_refused("--kernel" if plan.module is None else "--module", lambda: kernels_of(plan))
    if asked.resume is None:
        folder = Path(tempfile.mkdtemp(prefix="scout-discover-")).absolute()
    else:
        folder = made_folder(asked.resume, "--resume")
    _run(asked, plan, kernels, folder)
    if asked.resume is None:
        shutil.rmtree(folder)


def _run(asked: Asked, plan: DiscoveryPlan, kernels: Sequence[Kernel], folder: Path) -> None:
    from rich.console import Console

    from torchscout.cli.console import interruptible

    # moved
    from torchscout.cli.discover_plan import discovered
    from torchscout.experts.catalog import save, text_of

    print(f"What was executed is kept in {folder}", file=sys.stderr, flush=True)
    try:
        with interruptible(), Screen(Console(stderr=True)) as screen:
            catalog = discovered(plan, kernels, folder, screen)
        if asked.output is not None:
            save(catalog, asked.output)
    except KeyboardInterrupt:
        print(f"Interrupted. Every shape that was executed is kept in {folder}.", file=sys.stderr)
        print(f"Go on with: {_again(asked, folder)}", file=sys.stderr)
        raise typer.Exit(130) from None
    except CatalogError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(text_of(catalog) if asked.as_json else screen_of(catalog))


def _again(asked: Asked, folder: Path) -> str:
    return f"scout discover {repeated(replace(asked, resume=folder))}"


def _plan(asked: Asked) -> DiscoveryPlan:
    """A user's mistake shows before anything starts."""
    rows = _or_refused("--rows", lambda: rows_in(asked.rows))
    layers = _or_refused("--layers", lambda: layers_in(asked.layers))
    for name in ("hidden", "intermediate", "experts", "positions"):
        if (value := getattr(asked, name)) < 1:
            raise typer.BadParameter(f"at least 1, got {value}", param_hint=f"--{name}")
    for option, value, known in (("--kernel", asked.kernel, KERNELS), ("--regime", asked.regime, REGIMES)):
        if value not in known:
            raise typer.BadParameter(f"one of {', '.join(known)}, got {value!r}", param_hint=option)
    device = _or_refused("--device", lambda: _device(asked.device))
    if asked.module is None:
        _or_refused("--hidden, --intermediate", lambda: _require_memory(asked, device))
    return DiscoveryPlan(
        rows=rows,
        domain=asked.rows,
        hidden=asked.hidden,
        intermediate=asked.intermediate,
        experts=asked.experts,
        layers=layers,
        positions=asked.positions,
        kernel=asked.kernel if asked.module is None else "torch",
        module=asked.module,
        regime=asked.regime,
        device=device,
        programs=asked.programs,
        routings=_routings(asked),
    )


def _routings(asked: Asked) -> Routings | None:
    if asked.heterogeneous != (asked.tokens is not None):
        raise typer.BadParameter("--heterogeneous and --tokens go together", param_hint="--tokens")
    if asked.at_most and not asked.heterogeneous:
        raise typer.BadParameter("--at-most is about --heterogeneous --tokens", param_hint="--at-most")
    if asked.tokens is None:
        return None
    if asked.tokens < 1:
        raise typer.BadParameter(f"at least 1, got {asked.tokens}", param_hint="--tokens")
    from torchscout.experts.templates import Routings  # with it comes numpy

    return Routings(asked.experts, asked.tokens, asked.at_most)


def _device(given: str | None) -> str:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given is None:
        return "cuda" if devices else "cpu"
    kind, _, number = given.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"cpu, cuda or cuda:0, got {given!r}")
    if kind == "cuda" and not devices:
        raise ValueError(f"{given} needs a CUDA device, and PyTorch finds none")
    if kind == "cuda" and int(number or 0) >= devices:
        raise ValueError(f"PyTorch finds CUDA devices 0 to {devices - 1}, got {given!r}")
    return kind if kind == "cpu" else given


def _require_memory(asked: Asked, device: str) -> None:
    """``ValueError`` if the weights alone are larger than the memory; torch would fill it, and be killed."""
    import torch

    if device == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
    weights = 2 * asked.hidden * asked.intermediate * asked.experts * torch.bfloat16.itemsize
    if weights > memory:
        told = f"{size_in_words(weights)} of weights, and {device} has {size_in_words(memory)} of memory"
        raise ValueError(f"{asked.experts} experts of {asked.hidden} x {asked.intermediate} have {told}")


def _or_refused(option: str, action: Callable[[], _Value]) -> _Value:
    try:
        return action()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
