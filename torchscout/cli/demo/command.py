"""The demo's command."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.demo.stage import Kind, Memory, Stage, plan
from torchscout.cli.document import as_document

__all__ = ["demo"]

_ABOUT = """{stage} After every step they replay parts of it, vote on what they compute and hold, and keep \
what the vote certifies.
"""


def demo(
    fault: Annotated[
        list[Kind] | None, typer.Option(help="Only this, instead of all three; may be repeated.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=3, max=64, help="How many ranks; 8 by default.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="How they are laid out, such as replica=4,tensor=2; replica=4,expert=2 trains a mixture of "
            "experts."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose memory goes bad.")] = 5,
    at: Annotated[str | None, typer.Option(help="The MODULE/PARAMETER in it that does.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where to keep the evidence.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None,
) -> None:
    """A small training job with a slow rank, a flipped bit and a hang: see each named, and recovered from."""
    try:
        stage = Stage.read(ranks, mesh)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mesh") from error
    at = at or stage.weight
    if rank >= stage.ranks:
        raise typer.BadParameter(f"there are ranks 0 to {stage.ranks - 1}, got {rank}", param_hint="--rank")
    run_dir = (run_dir or Path(tempfile.mkdtemp(prefix="scout-demo-"))).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)

    from torchscout.cli.local_ranks import preload

    preload("torchscout.cli.demo.job")
    from torchscout.cli.campaign.leftovers import nothing_left
    from torchscout.cli.demo.job import surfaces
    from torchscout.cli.demo.lives import play
    from torchscout.cli.demo.screen import report_of, screen
    from torchscout.cli.demo.view import view_for
    from torchscout.cli.interruption import interruptible

    if at not in (known := surfaces(stage)):
        near = difflib.get_close_matches(at, known, n=3, cutoff=0.0)
        raise typer.BadParameter(f"the model has no {at!r}; there is {', '.join(near)}", param_hint="--at")
    planned = plan(stage, tuple(fault or Kind), Memory(rank, at))
    with interruptible(), nothing_left(run_dir), view_for(stage) as view:
        view.say(_ABOUT.format(stage=stage.told))
        played = play(stage, planned, run_dir, view)
    as_document(report_of(played, run_dir), screen(played, run_dir), as_json=as_json, output=output)
    raise typer.Exit(0 if played.grade.passed and played.recovered else 1)
