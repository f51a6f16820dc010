"""``scout demo``."""

from __future__ import annotations

import difflib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.console import AsJson, Output, interruptible, made_folder, print_report, refusing
from torchscout.cli.demo.scenario import MOST_RANKS, Kind, Memory, Scenario, plan

__all__ = ["demo"]

_ABOUT = """{scenario} After every step, replicas replay parts of it, vote on results and state, and keep \
checkpoints that the vote certifies.
"""

_RANK = 5
"""The rank whose memory is corrupted by default; the last one in smaller jobs."""


def demo(
    fault: Annotated[
        list[Kind] | None, typer.Option(help="Inject only this fault; may be repeated. By default all three.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=3, max=MOST_RANKS, help="Number of ranks; 8 by default.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Layout of the ranks, such as replica=4,tensor=2; replica=4,expert=2 trains a mixture of "
            "experts."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank with the flipped bit; by default 5, or the last one.")
    ] = None,
    at: Annotated[str | None, typer.Option(help="The MODULE/PARAMETER with the flipped bit.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="A new folder for the evidence.")] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Inject a slow rank, a flipped bit and a hang into a small training job, and recover from each."""
    kinds = _kinds(fault)
    scenario = _scenario(ranks, mesh)
    memory = Memory(_rank(rank, scenario), at or scenario.weight)

    from torchscout.cli.demo.job import surfaces
    from torchscout.cli.demo.runner import play, report_of, screen, view_for
    from torchscout.testing.leftovers import nothing_left
    from torchscout.testing.local_ranks import preload

    preload("torchscout.cli.demo.job")
    if memory.at not in (known := surfaces(scenario)):
        near = ", ".join(difflib.get_close_matches(memory.at, known, n=3, cutoff=0.0))
        raise typer.BadParameter(f"the model has no {memory.at!r}; it has {near}", param_hint="--at")
    run_dir = _empty(run_dir)
    planned = plan(scenario, kinds, memory)
    try:
        with interruptible(), nothing_left(run_dir), view_for(scenario) as view:
            view.say(_ABOUT.format(scenario=scenario.sentence))
            outcome = play(scenario, planned, run_dir, view)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. No process is left running. The evidence so far is in {run_dir}.", err=True)
        raise typer.Exit(130) from None
    print_report(report_of(outcome, run_dir), screen(outcome, run_dir), as_json=as_json, output=output)
    raise typer.Exit(0 if outcome.grade.passed and outcome.recovered else 1)


def _kinds(given: list[Kind] | None) -> tuple[Kind, ...]:
    kinds = tuple(given or Kind)
    if twice := next((each.value for each in kinds if kinds.count(each) > 1), None):
        raise typer.BadParameter(f"{twice} is given twice", param_hint="--fault")
    if given and Kind.NONE in kinds and len(kinds) > 1:
        raise typer.BadParameter("none cannot be combined with another fault", param_hint="--fault")
    return kinds


def _scenario(ranks: int | None, mesh: str | None) -> Scenario:
    given = {"--mesh": mesh, "--ranks": ranks}
    with refusing(", ".join(option for option, value in given.items() if value is not None)):
        return Scenario.read(ranks, mesh)


def _rank(given: int | None, scenario: Scenario) -> int:
    last = scenario.ranks - 1
    if given is not None and given > last:
        raise typer.BadParameter(f"the job has ranks 0 to {last}, got {given}", param_hint="--rank")
    return min(_RANK, last) if given is None else given


def _empty(run_dir: Path | None) -> Path:
    """A folder without evidence of an earlier demo, which would be mixed up with this one's."""
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="scout-demo-")).absolute()
    folder = made_folder(run_dir, "--run-dir")
    if any((folder / name).exists() for name in ("incidents", "records", "checkpoints", "ranks.log")):
        raise typer.BadParameter(f"{folder} has an earlier run; give a new folder", param_hint="--run-dir")
    return folder
