"""``scout campaign``: paper, ablation, recovery, table."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchscout.cli.console import (
    AsJson,
    Output,
    interruptible,
    made_folder,
    print_report,
    refusing,
    repeated,
    taking,
    write_file,
)
from torchscout.utils.text import wrapped

if TYPE_CHECKING:
    from torchscout.campaign.campaigns import Campaign
    from torchscout.campaign.cells.cell import Cell, Hardware
    from torchscout.campaign.machine import Skipped
    from torchscout.campaign.results import Store

__all__ = ["Options", "app", "print_campaign", "run_campaign"]

app = typer.Typer(
    help="Inject faults into real training jobs and count how many are found.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every campaign."""

    as_json: AsJson = False
    output: Output = None
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the table to a file.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random ranks, elements and places.")] = 0
    cells: Annotated[
        str, typer.Option(help="Run only these cells: ROW, ROW/LAYOUT or ROW/LAYOUT/NAME, * for anything.")
    ] = "*"
    jobs: Annotated[int, typer.Option(min=1, help="How many hangs to run at once; always 1 over NCCL.")] = 3
    quick: Annotated[bool, typer.Option("--quick", help="Run a sample of every row, in about 3 minutes.")] = (
        False
    )
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted campaign, to continue it.")
    ] = None


@dataclass(frozen=True, slots=True)
class PaperOptions(Options):
    """The options of the paper's campaign, which also runs on CUDA."""

    device: Annotated[str, typer.Option(help="Where to train: cpu or cuda.")] = "cpu"
    backend: Annotated[
        str | None,
        typer.Option(help="The backend of process groups: gloo or nccl; by default nccl on cuda."),
    ] = None
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most ranks of a job; larger jobs are reduced, or skipped and listed. "
            "By default 4 for each CUDA device, and any number on cpu.",
        ),
    ] = None


@app.command()
@taking(PaperOptions)
def paper(options: PaperOptions) -> None:
    """Reproduce the paper's table of fault injections on CPU or CUDA ranks."""
    from torchscout.campaign.campaigns import paper_on
    from torchscout.campaign.machine import hardware_for

    with refusing("--device, --backend"):
        hardware = hardware_for(options.device, options.backend, options.max_ranks)
    _run_and_print(paper_on(hardware), options, hardware)


@app.command()
@taking(Options)
def ablation(options: Options) -> None:
    """Leave out one component of the method at a time, and count what is still found."""
    from torchscout.campaign.campaigns import ABLATION
    from torchscout.campaign.cells.cell import Hardware

    _run_and_print(ABLATION, options, Hardware())


@app.command()
@taking(Options)
def recovery(options: Options) -> None:
    """Let SCOUT restart jobs under torchrun by itself: in place, with a standby, and without one."""
    from torchscout.campaign.campaigns import RECOVERY
    from torchscout.campaign.cells.cell import Hardware

    _run_and_print(RECOVERY, options, Hardware())


@app.command()
def table(
    reports: Annotated[
        list[Path], typer.Argument(metavar="REPORTS", help="JSON documents that --output has written.")
    ],
) -> None:
    """Print the tables of campaigns as Markdown."""
    from torchscout.campaign.tables import markdown

    def table_of(path: Path) -> str:
        try:
            return markdown(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{path} is not the --output of a campaign: {type(error).__name__}: {error}"
            raise typer.BadParameter(problem, param_hint="REPORTS") from error

    print("\n\n".join([table_of(path) for path in reports]))


def _run_and_print(campaign: Campaign, options: Options, hardware: Hardware) -> None:
    wanted, skipped = _wanted(campaign, options, hardware)
    report, screen = run_campaign(
        campaign,
        wanted,
        options.seed,
        options.jobs,
        options.resume,
        hardware=hardware,
        skipped=skipped,
        options=repeated(replace(options, resume=None)),
    )
    print_campaign(report, screen, options)


def print_campaign(report: dict[str, Any], screen: str, options: Options) -> None:
    """Print the report, and exit with status 1 if a cell has failed."""
    from torchscout.campaign.page import page

    if options.html is not None:
        write_file(options.html, page(report))
    print_report(report, screen, as_json=options.as_json, output=options.output)
    raise typer.Exit(0 if report["passed"] else 1)


def _wanted(campaign: Campaign, options: Options, hardware: Hardware) -> tuple[list[Cell], list[Skipped]]:
    """The selected cells that can run on this machine, and those that cannot."""
    from torchscout.campaign.campaigns import chosen, sampled
    from torchscout.campaign.machine import fitted, has_triton

    with refusing("--cells"):
        cells = chosen(campaign.cells(options.seed), campaign.rows, options.cells)
        cells = sampled(cells, options.seed, campaign.sample) if options.quick else cells
        wanted, skipped = fitted(cells, hardware, with_triton=has_triton())
        if not wanted:
            reasons = "; ".join(dict.fromkeys(each.reason for each in skipped))
            raise ValueError(f"none of these cells can run here: {reasons}")
    return wanted, skipped


def run_campaign(
    campaign: Campaign,
    cells: Sequence[Cell],
    seed: int,
    jobs: int,
    resumed: Path | None,
    *,
    hardware: Hardware | None = None,
    skipped: Sequence[Skipped] = (),
    options: str = "",
) -> tuple[dict[str, Any], str]:
    """Run every cell that has no result yet; return the document and the screen.

    An interruption leaves nothing behind but the results; ``options`` of the command line are repeated then.
    """
    from torchscout.campaign.cells.cell import Hardware
    from torchscout.campaign.machine import caption, counted_by_reason, described
    from torchscout.campaign.results import Store, summarized

    hardware = hardware or Hardware()
    if resumed is None:
        folder = Path(tempfile.mkdtemp(prefix="scout-campaign-")).absolute()
    else:
        folder = made_folder(resumed, "--resume")
    with refusing("--resume"):
        store = Store(folder, campaign.name, seed, hardware)
    for each in skipped:
        print(f"skipped {each.cell}: {each.reason}", file=sys.stderr)
    try:
        _run_all(campaign, cells, store, seed, jobs)
    except KeyboardInterrupt:
        kept = sum(cell.identity in store.results for cell in cells)
        print(
            f"Interrupted. No process is left running. {kept} of {len(cells)} results are in {store.path}.",
            file=sys.stderr,
        )
        command = ["scout", "campaign", campaign.name, *shlex.split(options), "--resume", str(store.folder)]
        print(f"To continue: {shlex.join(command)}", file=sys.stderr)
        raise typer.Exit(130) from None
    rows = summarized(campaign.rows, cells, store.results)
    results = [store.results[cell.identity] for cell in cells if cell.identity in store.results]
    report, screen = campaign.report(seed, rows, results, str(store.folder))
    report |= {**described(hardware), "skipped": [asdict(each) for each in skipped]}
    lines = [wrapped(caption(report), indent=2), screen, *map(wrapped, counted_by_reason(skipped))]
    return report, "\n".join(lines)


def _run_all(campaign: Campaign, cells: Sequence[Cell], store: Store, seed: int, jobs: int) -> None:
    from rich.console import Console

    from torchscout.campaign.campaigns import MODULES
    from torchscout.campaign.results import summarized
    from torchscout.campaign.tables import Screen
    from torchscout.testing.leftovers import nothing_left
    from torchscout.testing.local_ranks import preload

    left = [cell for cell in cells if cell.identity not in store.results]
    print(
        f"{len(left)} of {len(cells)} cells to run; results go to {store.folder}", file=sys.stderr, flush=True
    )
    with interruptible(), nothing_left(store.folder), Screen(Console(stderr=True), len(left)) as screen:
        preload(*MODULES)
        with closing(campaign.run(left, store.folder, seed, jobs)) as results:
            for result in results:
                store.add(result)
                screen.show(result, lambda: summarized(campaign.rows, cells, store.results))
