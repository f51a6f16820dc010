"""``scout discover``: finds the few expert shapes that represent all."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from torchscout.cli.console import exiting, interruptible, made_folder, refusing, repeated, taking
from torchscout.cli.discover.plan import (
    KERNELS,
    REGIMES,
    DiscoveryPlan,
    discovered,
    kernels_of,
    layers_in,
    rows_in,
)
from torchscout.errors import CatalogError
from torchscout.experts.catalog import Catalog
from torchscout.experts.coverage import Observed, Table
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted, size_in_words

if TYPE_CHECKING:
    from torchscout.cli.discover.plan import Kernel
    from torchscout.experts.templates import Routings

__all__ = ["Screen", "discover", "screen_of"]

_LINES = 10
"""Lines of progress for each kernel without a terminal."""
_MOST = 5
"""How many retained shapes of each kernel are printed; the table counts them all."""


class Screen:
    """Shows progress: a bar on a terminal, a few lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._kernel, self._shapes, self._done, self._retained = "", 0, 0, 0

    def __enter__(self) -> Screen:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, kernel: str, shapes: int) -> None:
        self._kernel, self._shapes, self._done, self._retained = kernel, shapes, 0, 0
        if self._progress is not None:
            self._task = self._progress.add_task(kernel, total=shapes)

    def show(self, seen: Observed) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
        elif self._done == self._shapes or self._done % max(1, self._shapes // _LINES) == 0:
            self._say(f"{self._kernel}: {self._done} of {self._shapes} shapes")
        if seen.profile is None and self._retained < _MOST:
            self._retained += 1
            self._say(f"{self._kernel}: rows {_rows(seen.rows)} retained, {seen.reason:.200}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def screen_of(catalog: Catalog) -> str:
    """A table of the admitted, selected and retained shapes."""
    heads = ["projection", "shapes", "admitted", "selected", "reduction", "occurrences covered", "retained"]
    parts = [table(heads, [_figures(each) for each in catalog.tables])]
    reasons = [_because(each) for each in catalog.tables if each.retained]
    gaps = [f"Not covered: {gap}. Only uniform shapes are covered." for gap in catalog.gaps]
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
    reasons = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    first = each.retained[0]
    shapes = counted(len(each.retained), "shape")
    return (
        f"{each.name}: {shapes} retained ({reasons}), such as rows {_rows(first.rows)}, {first.reason:.300}"
    )


def _rows(rows: tuple[int, ...]) -> str:
    return f"{rows[0]}" if len(set(rows)) == 1 else str(rows)


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**9 else f"{value:.2e}"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `scout discover`."""

    rows: Annotated[str, typer.Option(help="Row counts of an expert: 1:2048, both included, or 0,1,128.")]
    hidden: Annotated[int, typer.Option(help="Input and output features of an expert.")]
    intermediate: Annotated[int, typer.Option(help="Features between the two projections of an expert.")]
    experts: Annotated[int, typer.Option(help="Experts that one kernel executes together.")] = 1
    layers: Annotated[
        str,
        typer.Option(
            help="Names of the expert modules, separated by commas, with * for anything; or a number."
        ),
    ] = "*"
    positions: Annotated[int, typer.Option(help="Expert-parallel positions of each layer.")] = 1
    kernel: Annotated[
        str, typer.Option(help="triton, which counts its execution paths, or torch, which does not.")
    ] = "triton"
    module: Annotated[
        str | None,
        typer.Option(help="A function that returns the module to execute instead: package.module:function."),
    ] = None
    regime: Annotated[
        str, typer.Option(help="What comparable shapes have in common: pressure (idle or full), or waves.")
    ] = "pressure"
    device: Annotated[
        str | None, typer.Option(help="Where to execute; by default cuda if there is a device, else cpu.")
    ] = None
    programs: Annotated[
        int | None,
        typer.Option(min=1, help="Programs of the kernel; by default one for each multiprocessor."),
    ] = None
    heterogeneous: Annotated[
        bool,
        typer.Option("--heterogeneous", help="Also cover every routing of --tokens rows to the experts."),
    ] = False
    tokens: Annotated[int | None, typer.Option(help="Rows of all experts of one kernel together.")] = None
    at_most: Annotated[bool, typer.Option("--at-most", help="Also cover fewer rows than --tokens.")] = False
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted discovery, to continue it.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the catalog and nothing else.")] = False
    output: Annotated[Path | None, typer.Option(help="Write the catalog to a file.")] = None


@taking(Options)
def discover(options: Options) -> None:
    """Execute every admitted expert shape, and find the few that represent all of them."""
    plan = _plan(options)
    with refusing("--kernel" if plan.module is None else "--module"):
        kernels = kernels_of(plan)
    if options.resume is None:
        folder = Path(tempfile.mkdtemp(prefix="scout-discover-")).absolute()
    else:
        folder = made_folder(options.resume, "--resume")
    _run(options, plan, kernels, folder)
    if options.resume is None:
        shutil.rmtree(folder)


def _run(options: Options, plan: DiscoveryPlan, kernels: Sequence[Kernel], folder: Path) -> None:
    from torchscout.experts.catalog import save, text_of

    print(f"Executed shapes are stored in {folder}", file=sys.stderr, flush=True)
    try:
        with exiting(CatalogError), interruptible(), Screen(Console(stderr=True)) as screen:
            catalog = discovered(plan, kernels, folder, screen)
            if options.output is not None:
                save(catalog, options.output)
    except KeyboardInterrupt:
        print(f"Interrupted. The shapes that were executed are stored in {folder}.", file=sys.stderr)
        command = f"scout discover {repeated(replace(options, resume=folder))}"
        print(f"To continue: {command}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(text_of(catalog) if options.as_json else screen_of(catalog))


def _plan(options: Options) -> DiscoveryPlan:
    """Refuse wrong options before anything starts."""
    with refusing("--rows"):
        rows = rows_in(options.rows)
    with refusing("--layers"):
        layers = layers_in(options.layers)
    for name in ("hidden", "intermediate", "experts", "positions"):
        if (value := getattr(options, name)) < 1:
            raise typer.BadParameter(f"must be at least 1, got {value}", param_hint=f"--{name}")
    for option, value, known in (
        ("--kernel", options.kernel, KERNELS),
        ("--regime", options.regime, REGIMES),
    ):
        if value not in known:
            raise typer.BadParameter(f"must be one of {', '.join(known)}, got {value!r}", param_hint=option)
    with refusing("--device"):
        device = _device(options.device)
    if options.module is None:
        with refusing("--hidden, --intermediate"):
            _require_memory(options, device)
    return DiscoveryPlan(
        rows=rows,
        domain=options.rows,
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=options.experts,
        layers=layers,
        positions=options.positions,
        kernel=options.kernel if options.module is None else "torch",
        module=options.module,
        regime=options.regime,
        device=device,
        programs=options.programs,
        routings=_routings(options),
    )


def _routings(options: Options) -> Routings | None:
    if options.heterogeneous != (options.tokens is not None):
        raise typer.BadParameter("--heterogeneous and --tokens need each other", param_hint="--tokens")
    if options.at_most and not options.heterogeneous:
        raise typer.BadParameter("--at-most needs --heterogeneous and --tokens", param_hint="--at-most")
    if options.tokens is None:
        return None
    if options.tokens < 1:
        raise typer.BadParameter(f"must be at least 1, got {options.tokens}", param_hint="--tokens")
    from torchscout.experts.templates import Routings  # imports numpy

    return Routings(options.experts, options.tokens, options.at_most)


def _device(given: str | None) -> str:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given is None:
        return "cuda" if devices else "cpu"
    kind, _, number = given.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ValueError(f"must be cpu, cuda or cuda:0, got {given!r}")
    if kind == "cuda" and not devices:
        raise ValueError(f"{given} needs a CUDA device, but PyTorch finds none")
    if kind == "cuda" and int(number or 0) >= devices:
        raise ValueError(f"PyTorch finds CUDA devices 0 to {devices - 1}, got {given!r}")
    return kind if kind == "cpu" else given


def _require_memory(options: Options, device: str) -> None:
    """Raise ``ValueError`` if the weights alone exceed the memory, rather than be killed when it is full."""
    import torch

    if device == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
    weights = 2 * options.hidden * options.intermediate * options.experts * torch.bfloat16.itemsize
    if weights > memory:
        need = f"{size_in_words(weights)} for weights, but {device} has {size_in_words(memory)}"
        raise ValueError(
            f"{options.experts} experts of {options.hidden} x {options.intermediate} need {need}"
        )
