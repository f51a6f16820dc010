"""The campaign's commands."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from torchscout.cli.document import as_document

if TYPE_CHECKING:
    from torchscout.cli.campaign.campaigns import Campaign
    from torchscout.cli.campaign.cell import Cell
    from torchscout.cli.campaign.store import Store

__all__ = ["answer", "app", "run_campaign"]

_Value = TypeVar("_Value")

app = typer.Typer(
    help="Inject faults into real jobs, cell by cell, and count what was found.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_Output = Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")]
_Html = Annotated[Path | None, typer.Option(help="Write a page with the table to a file.")]
_Seed = Annotated[int, typer.Option(min=0, help="Chooses ranks, elements and places.")]
_Cells = Annotated[
    str, typer.Option(help="Run only these: ROW, ROW/LAYOUT or ROW/LAYOUT/NAME, * for anything.")
]
_Jobs = Annotated[int, typer.Option(min=1, help="How many hangs are run at once.")]
_Quick = Annotated[bool, typer.Option("--quick", help="A sample of every row, in under 3 minutes.")]
_Resume = Annotated[
    Path | None, typer.Option(help="The folder of an interrupted campaign, to go on with it.")
]


@app.command()
def paper(
    as_json: _Json = False,
    output: _Output = None,
    html: _Html = None,
    seed: _Seed = 0,
    cells: _Cells = "*",
    jobs: _Jobs = 3,
    quick: _Quick = False,
    resume: _Resume = None,
) -> None:
    """Reproduce the paper's table of fault-injection coverage, row by row, on CPU ranks."""
    from torchscout.cli.campaign.campaigns import PAPER

    wanted = _wanted(PAPER, seed, cells, quick=quick)
    report, screen = run_campaign(PAPER, wanted, seed, jobs, resume)
    answer(report, screen, as_json=as_json, output=output, html=html)


@app.command()
def ablation(
    as_json: _Json = False,
    output: _Output = None,
    html: _Html = None,
    seed: _Seed = 0,
    cells: _Cells = "*",
    jobs: _Jobs = 3,
    quick: _Quick = False,
    resume: _Resume = None,
) -> None:
    """Decide the same cells again with one piece of the method left out: who is named then."""
    from torchscout.cli.campaign.campaigns import ABLATION

    wanted = _wanted(ABLATION, seed, cells, quick=quick)
    report, screen = run_campaign(ABLATION, wanted, seed, jobs, resume)
    answer(report, screen, as_json=as_json, output=output, html=html)


def _wanted(campaign: Campaign, seed: int, pattern: str, *, quick: bool) -> list[Cell]:
    from torchscout.cli.campaign.selection import chosen, sampled

    cells = _or_refused("--cells", lambda: chosen(campaign.cells(seed), campaign.rows, pattern))
    return sampled(cells, seed, campaign.sample) if quick else cells


def run_campaign(
    campaign: Campaign, cells: Sequence[Cell], seed: int, jobs: int, resumed: Path | None
) -> tuple[dict[str, Any], str]:
    """Every cell that has no result yet; what a signal interrupts leaves nothing behind but its results."""
    from torchscout.cli.campaign.store import Store

    store = _or_refused("--resume", lambda: Store(_folder(resumed), campaign.name, seed))
    try:
        _run_all(campaign, cells, store, seed, jobs)
    except KeyboardInterrupt:
        told = (
            f"Interrupted; nothing is left running. Go on with: scout campaign {campaign.name} --seed {seed}"
        )
        print(f"{told} --resume {store.folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    summaries, results = store.summaries(campaign.rows, cells)
    return campaign.told(seed, summaries, results, str(store.folder))


def _run_all(campaign: Campaign, cells: Sequence[Cell], store: Store, seed: int, jobs: int) -> None:
    from rich.console import Console

    from torchscout.cli.campaign.campaigns import MODULES
    from torchscout.cli.campaign.leftovers import nothing_left
    from torchscout.cli.campaign.table import Screen
    from torchscout.cli.interruption import interruptible
    from torchscout.cli.local_ranks import preload

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
    from torchscout.cli.campaign.page import page

    if html is not None:
        html.write_text(page(report))
    as_document(report, screen, as_json=as_json, output=output)
    raise typer.Exit(0 if report["passed"] else 1)


def _folder(resumed: Path | None) -> Path:
    return (resumed or Path(tempfile.mkdtemp(prefix="scout-campaign-"))).absolute()


def _or_refused(option: str, action: Callable[[], _Value]) -> _Value:
    """A user's mistake shows before anything starts."""
    try:
        return action()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
