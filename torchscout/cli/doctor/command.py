"""``scout doctor``: options, order of the checks, output."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchscout.checkpoint.storage.memory import memory_root
from torchscout.cli.checkpoint.wording import counted, stacked, table
from torchscout.cli.console import as_document, taking
from torchscout.cli.doctor import machine_checks, software_checks
from torchscout.cli.doctor import probes as kernel
from torchscout.cli.doctor.facts import (
    Clock,
    Finding,
    Folder,
    Grade,
    Installed,
    JobDescription,
    Limits,
    Met,
    Reached,
    Stacks,
    TorchFacts,
    skipped,
)
from torchscout.cli.doctor.probes import (
    FRAMEWORKS,
    ask_torch,
    folder_at,
    installed,
    not_repeating,
    own_versions,
)
from torchscout.config import ObserverConfig
from torchscout.errors import ScoutError
from torchscout.observer.record.directory import records_home

if TYPE_CHECKING:
    from torchscout.cli.doctor.facts import JobDescription

__all__ = ["Facts", "doctor", "findings_of", "gathered", "screen"]


def screen(findings: Sequence[Finding], counts: Mapping[Grade, int]) -> str:
    rows: list[list[str]] = []
    for each in findings:
        rows.append([each.status.value, each.name, each.what])
        if each.fix is not None:
            rows.append(["", "", f"-> {each.fix}"])
    return stacked([table(["status", "check", "found"], rows), "", _summary(counts)])


def _summary(counts: Mapping[Grade, int]) -> str:
    failed, warned = counts[Grade.FAIL], counts[Grade.WARN]
    worth = f"{counted(warned, 'warning')}." if warned else ""
    if failed:
        return (
            f"{counted(failed, 'check')} failed: do what the arrows say before a long run. {worth}".rstrip()
        )
    return f"This machine is fit for a long run. {worth}".rstrip()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was found out about this machine."""

    installed: Installed
    torch: TorchFacts
    reached: Reached | None
    """None where ZeroMQ cannot do what a board needs."""
    met: Met | None
    """The other machine, if one was to be asked."""
    stacks: Stacks
    clock: Clock
    limits: Limits
    memory: Folder
    records: Folder
    directory: Folder | None
    """Of checkpoints, if it was named."""
    not_repeating: Mapping[str, str] | None = None
    """Surfaces that a run has left out of comparisons, if it was named and has records."""


def gathered(
    checkpoint: Path | None,
    address: str,
    port: int,
    other: tuple[str, int] | None,
    run_dir: Path | None = None,
) -> Facts:
    packages, reached, met = installed(), None, None
    if packages.curve:
        from torchscout.cli.doctor.network import meet, reach_own_board

        reached = reach_own_board(address, port)
        met = None if other is None else meet(other, packages.versions)
    return Facts(
        packages,
        ask_torch(),
        reached,
        met,
        kernel.own_stacks(ObserverConfig().stack_signal),
        kernel.clock(),
        kernel.limits(),
        folder_at(memory_root()),
        folder_at(records_home()),
        None if checkpoint is None else folder_at(checkpoint),
        None if run_dir is None else not_repeating(run_dir),
    )


def findings_of(facts: Facts, plan: JobDescription) -> list[Finding]:
    """In the order in which one would fix them."""
    return [
        software_checks.python(facts.installed),
        software_checks.torch(facts.installed, facts.torch),
        software_checks.restarts(facts.torch, os.environ),
        software_checks.backends(facts.torch),
        software_checks.cuda(facts.torch),
        software_checks.triton(facts.torch),
        software_checks.attention(facts.torch),
        software_checks.frameworks(facts.installed, FRAMEWORKS),
        software_checks.curve(facts.installed),
        *_connections(facts, plan),
        machine_checks.stacks(facts.stacks),
        machine_checks.monotonic(facts.clock),
        machine_checks.open_files(facts.limits, plan.world_size),
        machine_checks.file_size(facts.limits, plan.state_bytes),
        machine_checks.memory(facts.memory, plan),
        machine_checks.private([facts.records, facts.memory]),
        machine_checks.directory(facts.directory, plan),
        software_checks.surfaces(facts.not_repeating),
        *machine_checks.fits(plan),
        *machine_checks.peers(plan.mesh, has_experts=plan.has_experts),
    ]


def _connections(facts: Facts, plan: JobDescription) -> list[Finding]:
    if facts.reached is None:
        return [skipped("board", "it needs pyzmq with CURVE")]
    own = machine_checks.board(facts.reached, plan.machines)
    if facts.met is None:
        return [
            own,
            skipped("other machine", "run scout doctor --listen there, and --connect HOST:PORT here"),
        ]
    return [
        own,
        machine_checks.other_machine(facts.met),
        machine_checks.other_versions(facts.met, facts.installed.versions),
        machine_checks.other_clock(facts.met),
    ]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `scout doctor`."""

    mesh: Annotated[
        str | None, typer.Option(help="How the job is laid out, such as replica=4,shard=2,tensor=2.")
    ] = None
    experts: Annotated[
        int, typer.Option(min=1, help="Expert partitions, carved out of the mesh's replicas or shards.")
    ] = 1
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine; by default one for each CUDA device.")
    ] = None
    machines: Annotated[
        int | None, typer.Option(min=1, help="Machines of the job; by default as many as the mesh takes.")
    ] = None
    state_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of one rank's training state.")] = None
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Or its parameters: 12 bytes each, float32 and Adam's slots.")
    ] = None
    checkpoint: Annotated[Path | None, typer.Option(help="The folder that checkpoints go to.")] = None
    run_dir: Annotated[
        Path | None, typer.Option(help="A job's run directory: which of its surfaces do not repeat.")
    ] = None
    address: Annotated[str, typer.Option(help="As ObserverConfig.address: an interface or address.")] = "*"
    port: Annotated[int, typer.Option(min=0, max=65528, help="As ObserverConfig.port; 0 is any.")] = 0
    listen: Annotated[bool, typer.Option("--listen", help="Only answer other machines' doctors.")] = False
    seconds: Annotated[
        float | None, typer.Option(min=0, help="How long to listen; by default until interrupted.")
    ] = None
    connect: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ask the doctor that listens there, too.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False
    output: Annotated[Path | None, typer.Option(help="Write that JSON document to a file.")] = None


@taking(Asked)
def doctor(asked: Asked) -> None:
    """Check whether this machine is fit for a long run, and say what to fix.

    The exit status is 1 if anything fails.
    """
    _refuse_contradictions(asked)
    if asked.listen:
        _listen(asked)
        return
    # moved  # other commands do without numpy

    other = None if asked.connect is None else _address_of(asked.connect)
    _plan(asked, devices=0)  # a mistake shows before anything is tried
    facts = gathered(asked.checkpoint, asked.address, asked.port, other, asked.run_dir)
    findings = findings_of(facts, _plan(asked, devices=len(facts.torch.devices)))
    counts = {grade: sum(each.status is grade for each in findings) for grade in Grade}
    report: dict[str, Any] = {
        "fit": not counts[Grade.FAIL],
        "host": socket.gethostname(),
        "findings": [asdict(each) for each in findings],
    }
    as_document(report, screen(findings, counts), as_json=asked.as_json, output=asked.output)
    raise typer.Exit(0 if report["fit"] else 1)


def _refuse_contradictions(asked: Asked) -> None:
    if asked.listen and asked.connect is not None:
        raise typer.BadParameter(
            "--listen only answers; give --connect on the other machine", param_hint="--connect"
        )
    if asked.seconds is not None and (not asked.listen or math.isnan(asked.seconds)):
        raise typer.BadParameter(
            f"a number of seconds, together with --listen, got {asked.seconds}", param_hint="--seconds"
        )
    if asked.checkpoint is not None and asked.checkpoint.exists() and not asked.checkpoint.is_dir():
        raise typer.BadParameter(f"{asked.checkpoint} is not a folder", param_hint="--checkpoint")
    if asked.run_dir is not None and not (asked.run_dir / "records").is_dir():
        raise typer.BadParameter(
            f"{asked.run_dir} is not a job's run directory: it has no folder records", param_hint="--run-dir"
        )


def _plan(asked: Asked, *, devices: int) -> JobDescription:
    from torchscout.cli.doctor.facts import BYTES_PER_PARAMETER, JobDescription, laid_out, mesh_of

    if asked.state_bytes is not None and asked.parameters is not None:
        raise typer.BadParameter("give --state-bytes or --parameters, not both", param_hint="--parameters")
    if asked.mesh is None and asked.experts > 1:
        raise typer.BadParameter("experts are carved out of a mesh: give --mesh too", param_hint="--experts")
    state_bytes = asked.state_bytes
    if asked.parameters is not None:
        if not math.isfinite(size := asked.parameters * BYTES_PER_PARAMETER):
            raise typer.BadParameter(
                f"a number of parameters, got {asked.parameters}", param_hint="--parameters"
            )
        state_bytes = int(size)
    given = {"--mesh": asked.mesh, "--ranks": asked.ranks, "--machines": asked.machines}
    hint = "--mesh" if asked.experts == 1 else "--mesh, --experts"
    try:
        mesh = None if asked.mesh is None else mesh_of(asked.mesh, asked.experts)
        hint = ", ".join(option for option, value in given.items() if value is not None)
        ranks, machines = laid_out(None if mesh is None else len(mesh), asked.ranks, asked.machines, devices)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error
    return JobDescription(ranks, machines, state_bytes, mesh, asked.experts > 1)


def _address_of(told: str) -> tuple[str, int]:
    host, _, port = told.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"HOST:PORT, such as node1:41234, got {told!r}", param_hint="--connect")
    return host.strip("[]"), int(port)


def _listen(asked: Asked) -> None:
    """Nothing is examined here: the doctors that ask say what they find."""
    from torchscout.cli.console import interruptible
    from torchscout.cli.doctor.network import address_for_others, serve  # with it comes ZeroMQ

    def ready(port: int) -> None:
        where = f"{address_for_others(asked.address)}:{port}"
        typer.echo(f"On every other machine run: scout doctor --connect {where}", err=True)

    until = None if asked.seconds is None else time.monotonic() + asked.seconds
    visits: list[dict[str, Any]] = []
    try:
        with interruptible():  # also if the parent process ignored SIGINT, as nohup does
            for visit in serve(asked.address, asked.port, own_versions(), until, ready):
                visits.append({"host": visit.host, "versions": dict(visit.versions)})
                typer.echo(f"{visit.host} was here.", err=True)
    except KeyboardInterrupt:
        pass
    except (ScoutError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--address, --port") from error
    report = {"host": socket.gethostname(), "visits": visits}
    as_document(report, f"{counted(len(visits), 'visit')}.", as_json=asked.as_json, output=asked.output)
