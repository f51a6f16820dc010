"""The demo's command and its screen."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.cli.document import as_document

__all__ = ["demo"]

STAGE = "Eight CPU ranks train a small Transformer: 4 replicas x 2 tensor shards."


def demo(
    rank: Annotated[int, typer.Option(min=0, max=7, help="The rank whose memory goes bad.")] = 5,
    step: Annotated[int, typer.Option(min=1, max=10, help="The training step after which it does.")] = 7,
    at: Annotated[str, typer.Option(help="MODULE/PARAMETER to hit.")] = "layer.2.attention.query/weight",
    bit: Annotated[int, typer.Option(min=0, max=31, help="The bit to flip; 0 is the lowest.")] = 12,
    clean: Annotated[bool, typer.Option("--clean", help="Inject nothing: the replicas must agree.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Where to keep the evidence.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None,
) -> None:
    """Flip one bit of one weight on one of eight training ranks; see it found, named and recovered from."""
    from torchscout.cli.local_ranks import preload, run_ranks
    from torchscout.faults.fault import Faults

    run_dir = run_dir or Path(tempfile.mkdtemp(prefix="scout-demo-"))
    # Checkpoints in memory outlive the job; the demo's shall not outlive its folder.
    os.environ["TORCHSCOUT_MEMORY"] = str((run_dir / "memory").absolute())
    preload("torchscout.cli.demo.job")
    from torchscout.cli.demo.job import RANKS, surfaces, train, train_alone

    if at not in (known := surfaces()):
        near = difflib.get_close_matches(at, known, n=3, cutoff=0.0)
        raise typer.BadParameter(f"the model has no {at!r}; there is {', '.join(near)}", param_hint="--at")
    faults = Faults() if clean else Faults().flip_bit(rank=rank, at=at, step=step, bit=bit)
    print(
        f"{STAGE}\nAfter every step they replay parts of it, vote on what they compute and hold, and keep "
        "what the vote certifies.\n",
        file=sys.stderr,
        flush=True,
    )
    outcomes = run_ranks(train, RANKS, faults, run_dir, timeout=300.0)
    report = summarize(outcomes, faults, run_dir)
    if report["status"]["checkpoint"]["poisoned"] is not None:
        print("\nThe job is started again, by new processes.\n", file=sys.stderr, flush=True)
        outcomes = run_ranks(train, RANKS, Faults(), run_dir, True, timeout=300.0)
    report["resumed"] = outcomes[0].resumed
    report["recovered"] = [each.state for each in outcomes] == run_ranks(train_alone, RANKS, timeout=300.0)
    as_document(report, screen(report), as_json=as_json, output=output)
    raise typer.Exit(0 if report["exact"] and report["recovered"] else 1)


def summarize(outcomes: list[Any], faults: Any, run_dir: Path) -> dict[str, Any]:
    """One document: what was done to the job, what was found, and whether the two are the same."""
    from torchscout.cli.demo.job import REPLICAS, SHARDS
    from torchscout.decision.record import Incident
    from torchscout.decision.recorder import Stamped, read
    from torchscout.mesh import Mesh

    path = run_dir / "incidents.jsonl"
    lines = [line.item for line in read(path) if isinstance(line, Stamped)] if path.exists() else []
    incidents = [line.to_json() for line in lines if isinstance(line, Incident)]
    fired = [asdict(firing) for outcome in outcomes for firing in outcome.fired]
    found = [(each["manifestation"], each["ranks"], each["surface"], each["step"]) for each in incidents]
    true = [
        (truth.manifestation.value, list(truth.ranks), truth.surface, truth.steps[0])
        for truth in faults.truth(Mesh.grid(replica=REPLICAS, tensor=SHARDS))
    ]
    return {
        "exact": found == true and len(fired) == len(faults),
        "injected": fired,
        "incidents": incidents,
        "losses": outcomes[0].losses,
        "status": outcomes[0].status,
        "run_dir": str(run_dir),
    }


def screen(report: dict[str, Any]) -> str:
    lines = [
        "",
        *(
            f"injected   step {fault['step']}, rank {fault['rank']}, {fault['at']}: {fault['detail']}"
            for fault in report["injected"]
        ),
    ]
    for incident in report["incidents"]:
        named = ", ".join(f"rank {rank}" for rank in incident["ranks"])
        lines.append(f"named      step {incident['step']}, {named}, {incident['surface']}")
        votes = zip(incident["peers"], incident["records"][0]["evidence"], strict=True)
        lines += [f"           rank {peer} holds {signature}" for peer, signature in votes]
    if not report["incidents"]:
        lines.append("named      nobody: the replicas agreed on all they computed and held")
    covered = report["status"]["replay"]["coverage"]
    checked = ", ".join(f"{each['targets']} {name}" for name, each in covered.items() if name != "census")
    lines.append(f"checked    {report['status']['replay']['checks']} times: all state, and in turn {checked}")
    lines.append(f"loss       {' '.join(f'{loss:.2f}' for loss in report['losses'])}")
    lines.append(f"evidence   {report['run_dir']}/incidents.jsonl and records/")
    if report["incidents"]:
        lines.append(f"resumed    after step {report['resumed']['step']}: {report['resumed']['reason']}")
    outcome = "Exactly what was injected was named." if report["exact"] else "This is NOT what was injected."
    state = "The job ended with bitwise the state of one that was never disturbed."
    if not report["recovered"]:
        state = "The job did NOT end with the state of one that was never disturbed."
    return "\n".join([*lines, "", outcome, state])
