"""The campaign's commands."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from torchscout.cli.console import as_document, made_folder, repeated, taking, written
from torchscout.utils.text import wrapped

if TYPE_CHECKING:
    from torchscout.campaign.campaigns import Campaign
    from torchscout.campaign.cell import Cell, Hardware
    from torchscout.campaign.machine import Skipped
    from torchscout.campaign.results import Store

__all__ = ["answer", "app", "run_campaign"]

_Value = TypeVar("_Value")

app = typer.Typer(
    help="Inject faults into real jobs, cell by cell, and count what was found.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of every campaign."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with the table to a file.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Chooses ranks, elements and places.")] = 0
    cells: Annotated[
        str, typer.Option(help="Run only these: ROW, ROW/LAYOUT or ROW/LAYOUT/NAME, * for anything.")
    ] = "*"
    jobs: Annotated[int, typer.Option(min=1, help="How many hangs are run at once; over NCCL 1.")] = 3
    quick: Annotated[
        bool, typer.Option("--quick", help="A sample of every row, in about 3 minutes or less.")
    ] = False
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted campaign, to go on with it.")
    ] = None


@dataclass(frozen=True, slots=True)
class AskedPaper(Asked):
    """Those of the paper's, which also runs on CUDA."""

    device: Annotated[str, typer.Option(help="What jobs compute on: cpu or cuda.")] = "cpu"
    backend: Annotated[
        str | None,
        typer.Option(help="What ranks communicate over: gloo, or on cuda nccl, which is the default there."),
    ] = None
    max_ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many ranks a job may have; larger jobs are reduced, or skipped and listed. "
            "By default 4 for each CUDA device, and any number on cpu.",
        ),
    ] = None


@app.command()
@taking(AskedPaper)
def paper(asked: AskedPaper) -> None:
    """Reproduce the paper's table of fault-injection coverage, row by row, on CPU or CUDA ranks."""
    from torchscout.campaign.campaigns import paper_on
    from torchscout.campaign.machine import hardware_for

    hardware = _or_refused(
        "--device, --backend", lambda: hardware_for(asked.device, asked.backend, asked.max_ranks)
    )
    _run_and_answer(paper_on(hardware), asked, hardware)


@app.command()
@taking(Asked)
def ablation(asked: Asked) -> None:
    """Decide the same cells again with one piece of the method left out: who is named then."""
    from torchscout.campaign.campaigns import ABLATION
    from torchscout.campaign.cell import Hardware

    _run_and_answer(ABLATION, asked, Hardware())


@app.command()
def table(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORTS", help="What --output has written.")],
) -> None:
    """Print the table of a campaign's JSON document as Markdown."""
    from torchscout.campaign.tables import markdown

    def table_of(path: Path) -> str:
        try:
            return markdown(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            told = f"{path} is not what --output of a campaign writes: {type(error).__name__}: {error}"
            raise typer.BadParameter(told, param_hint="REPORTS") from error

    print("\n\n".join([table_of(path) for path in reports]))


def _run_and_answer(campaign: Campaign, asked: Asked, hardware: Hardware) -> None:
    wanted, skipped = _wanted(campaign, asked, hardware)
    report, screen = run_campaign(
        campaign,
        wanted,
        asked.seed,
        asked.jobs,
        asked.resume,
        hardware=hardware,
        skipped=skipped,
        options=repeated(replace(asked, resume=None)),
    )
    answer(report, screen, as_json=asked.as_json, output=asked.output, html=asked.html)


def _wanted(campaign: Campaign, asked: Asked, hardware: Hardware) -> tuple[list[Cell], list[Skipped]]:
    """Those of the campaign that are to run, and those of them that cannot run on this machine."""
    from torchscout.campaign.campaigns import chosen, sampled
    from torchscout.campaign.machine import fitted, has_triton

    cells = _or_refused("--cells", lambda: chosen(campaign.cells(asked.seed), campaign.rows, asked.cells))
    cells = sampled(cells, asked.seed, campaign.sample) if asked.quick else cells
    wanted, skipped = fitted(cells, hardware, with_triton=has_triton())
    if not wanted:
        reasons = "; ".join(dict.fromkeys(each.reason for each in skipped))
        raise typer.BadParameter(f"none of these cells can run here: {reasons}", param_hint="--cells")
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
    """Every cell that has no result yet; what a signal interrupts leaves nothing behind but its results.

    ``options`` are those of the command line, for whoever wants to go on after an interruption.
    """
    from torchscout.campaign.cell import Hardware
    from torchscout.campaign.machine import caption, counted_by_reason, described
    from torchscout.campaign.results import Store

    hardware = hardware or Hardware()
    store = _or_refused("--resume", lambda: Store(_folder(resumed), campaign.name, seed, hardware))
    for each in skipped:
        print(f"skipped {each.cell}: {each.reason}", file=sys.stderr)
    try:
        _run_all(campaign, cells, store, seed, jobs)
    except KeyboardInterrupt:
        kept = sum(cell.identity in store.results for cell in cells)
        print(
            f"Interrupted; nothing is left running. {kept} of {len(cells)} results are kept in {store.path}.",
            file=sys.stderr,
        )
        again = ["scout", "campaign", campaign.name, *shlex.split(options), "--resume", str(store.folder)]
        print(f"Go on with: {shlex.join(again)}", file=sys.stderr)
        raise typer.Exit(130) from None
    summaries, results = store.summaries(campaign.rows, cells)
    report, screen = campaign.told(seed, summaries, results, str(store.folder))
    report |= {**described(hardware), "skipped": [each.to_json() for each in skipped]}
    lines = [wrapped(caption(report), indent=2), screen, *map(wrapped, counted_by_reason(skipped))]
    return report, "\n".join(lines)


def _run_all(campaign: Campaign, cells: Sequence[Cell], store: Store, seed: int, jobs: int) -> None:
    from rich.console import Console

    from torchscout.campaign.campaigns import MODULES
    from torchscout.campaign.tables import Screen
    from torchscout.cli.console import interruptible
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
                screen.show(result, lambda: store.summaries(campaign.rows, cells)[0])


def answer(
    report: dict[str, Any], screen: str, *, as_json: bool, output: Path | None, html: Path | None
) -> None:
    from torchscout.campaign.page import page

    if html is not None:
        written(html, page(report))
    as_document(report, screen, as_json=as_json, output=output)
    raise typer.Exit(0 if report["passed"] else 1)


def _folder(resumed: Path | None) -> Path:
    if resumed is not None:
        return made_folder(resumed, "--resume")
    return Path(tempfile.mkdtemp(prefix="scout-campaign-")).absolute()


def _or_refused(option: str, action: Callable[[], _Value]) -> _Value:
    """A user's mistake shows before anything starts."""
    try:
        return action()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
