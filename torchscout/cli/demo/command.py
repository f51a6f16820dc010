"""The demo's command."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import as_document, made_folder
from torchscout.cli.demo.scenario import MOST_RANKS, Kind, Memory, Scenario, plan

__all__ = ["demo"]

_ABOUT = """{stage} After every step they replay parts of it, vote on what they compute and hold, and keep \
what the vote certifies.
"""

_RANK = 5
"""Whose memory goes bad, where there are so many."""


def demo(
    fault: Annotated[
        list[Kind] | None, typer.Option(help="Only this, instead of all three; may be repeated.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=3, max=MOST_RANKS, help="How many ranks; 8 by default.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="How they are laid out, such as replica=4,tensor=2; replica=4,expert=2 trains a mixture of "
            "experts."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank whose memory goes bad; by default 5, or the last one.")
    ] = None,
    at: Annotated[str | None, typer.Option(help="The MODULE/PARAMETER in it that does.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="A new folder, to keep the evidence in.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None,
) -> None:
    """A small training job with a slow rank, a flipped bit and a hang: see each named, and recovered from."""
    kinds = _kinds(fault)
    stage = _stage(ranks, mesh)
    memory = Memory(_rank(rank, stage), at or stage.weight)

    from torchscout.testing.local_ranks import preload

    preload("torchscout.cli.demo.job")
    from torchscout.cli.console import interruptible
    from torchscout.cli.demo.job import surfaces
    from torchscout.cli.demo.runner import play, report_of, screen, view_for
    from torchscout.testing.leftovers import nothing_left

    if memory.at not in (known := surfaces(stage)):
        near = ", ".join(difflib.get_close_matches(memory.at, known, n=3, cutoff=0.0))
        raise typer.BadParameter(f"the model has no {memory.at!r}; there is {near}", param_hint="--at")
    run_dir = _empty(run_dir)
    planned = plan(stage, kinds, memory)
    try:
        with interruptible(), nothing_left(run_dir), view_for(stage) as view:
            view.say(_ABOUT.format(stage=stage.told))
            played = play(stage, planned, run_dir, view)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted; nothing is left running. The evidence so far is in {run_dir}.", err=True)
        raise typer.Exit(130) from None
    as_document(report_of(played, run_dir), screen(played, run_dir), as_json=as_json, output=output)
    raise typer.Exit(0 if played.grade.passed and played.recovered else 1)


def _kinds(given: list[Kind] | None) -> tuple[Kind, ...]:
    kinds = tuple(given or Kind)
    if twice := next((each.value for each in kinds if kinds.count(each) > 1), None):
        raise typer.BadParameter(f"{twice} is given twice", param_hint="--fault")
    if given and Kind.NONE in kinds and len(kinds) > 1:
        raise typer.BadParameter("none cannot be combined with another fault", param_hint="--fault")
    return kinds


def _stage(ranks: int | None, mesh: str | None) -> Scenario:
    given = {"--mesh": mesh, "--ranks": ranks}
    try:
        return Scenario.read(ranks, mesh)
    except ValueError as error:
        hint = ", ".join(option for option, value in given.items() if value is not None)
        raise typer.BadParameter(str(error), param_hint=hint) from error


def _rank(given: int | None, stage: Scenario) -> int:
    last = stage.ranks - 1
    if given is not None and given > last:
        raise typer.BadParameter(f"there are ranks 0 to {last}, got {given}", param_hint="--rank")
    return min(_RANK, last) if given is None else given


def _empty(run_dir: Path | None) -> Path:
    """Evidence of an earlier demo would be taken for this one's."""
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="scout-demo-")).absolute()
    folder = made_folder(run_dir, "--run-dir")
    if any((folder / name).exists() for name in ("incidents.jsonl", "records", "checkpoints", "ranks.log")):
        raise typer.BadParameter(f"{folder} holds an earlier run; give a new folder", param_hint="--run-dir")
    return folder
