"""``scout doctor``: options, order of the checks, output."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torchscout.checkpoint.memory import memory_root
from torchscout.cli.console import AsJson, Output, interruptible, print_report, refusing, taking
from torchscout.cli.doctor import machine_checks, software_checks
from torchscout.cli.doctor import probes as kernel
from torchscout.cli.doctor.facts import (
    BYTES_PER_PARAMETER,
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
    laid_out,
    mesh_of,
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
from torchscout.utils.identity import host_name
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted

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
    verdict = "This machine is ready for a long run."
    if failed:
        verdict = f"{counted(failed, 'check')} failed: follow the arrows before a long run."
    return f"{verdict} {counted(warned, 'warning')}." if warned else verdict


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts about this machine."""

    installed: Installed
    torch: TorchFacts
    reached: Reached | None
    """None if ZeroMQ lacks what a board needs."""
    met: Met | None
    """The other machine, with --connect."""
    stacks: Stacks
    clock: Clock
    limits: Limits
    memory: Folder
    records: Folder
    directory: Folder | None
    """The checkpoint folder, with --checkpoint."""
    not_repeating: Mapping[str, str] | None = None
    """The nondeterministic surfaces of a run, with --run-dir."""


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
    """All findings, in the order in which to fix them."""
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
        machine_checks.open_files(facts.limits, plan),
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
            skipped("other machine", "run scout doctor --listen there, then --connect HOST:PORT here"),
        ]
    return [
        own,
        machine_checks.other_machine(facts.met),
        machine_checks.other_versions(facts.met, facts.installed.versions),
        machine_checks.other_clock(facts.met),
    ]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `scout doctor`."""

    mesh: Annotated[
        str | None, typer.Option(help="The job's layout, such as replica=4,shard=2,tensor=2.")
    ] = None
    experts: Annotated[
        int, typer.Option(min=1, help="Expert-parallel degree, carved out of the mesh's replicas or shards.")
    ] = 1
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine; by default one for each CUDA device.")
    ] = None
    machines: Annotated[
        int | None, typer.Option(min=1, help="Machines of the job; by default as many as the mesh needs.")
    ] = None
    state_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of one rank's training state.")] = None
    parameters: Annotated[
        float | None,
        typer.Option(
            min=1, help=f"Or one rank's parameters, {BYTES_PER_PARAMETER} bytes each: float32 with Adam."
        ),
    ] = None
    checkpoint: Annotated[Path | None, typer.Option(help="The job's checkpoint folder.")] = None
    run_dir: Annotated[
        Path | None, typer.Option(help="A run directory, to list its nondeterministic surfaces.")
    ] = None
    address: Annotated[str, typer.Option(help="ObserverConfig.address: an interface or address.")] = "*"
    port: Annotated[int, typer.Option(help="ObserverConfig.port; 0 is any.")] = 0
    listen: Annotated[bool, typer.Option("--listen", help="Only answer doctors on other machines.")] = False
    seconds: Annotated[
        float | None, typer.Option(min=0, help="How long to listen; by default until interrupted.")
    ] = None
    connect: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Also check the connection to a listening doctor.")
    ] = None
    as_json: AsJson = False
    output: Output = None


@taking(Options)
def doctor(options: Options) -> None:
    """Check whether this machine is ready for a long run, and show what to fix.

    The exit status is 1 if a check fails.
    """
    _refuse_contradictions(options)
    if options.listen:
        _listen(options)
        return
    other = None if options.connect is None else _address_of(options.connect)
    _plan(options, devices=0)  # refuse wrong options before trying anything
    facts = gathered(options.checkpoint, options.address, options.port, other, options.run_dir)
    findings = findings_of(facts, _plan(options, devices=len(facts.torch.devices)))
    counts = {grade: sum(each.status is grade for each in findings) for grade in Grade}
    report: dict[str, Any] = {
        "fit": not counts[Grade.FAIL],
        "host": host_name(),
        "findings": [asdict(each) for each in findings],
    }
    print_report(report, screen(findings, counts), as_json=options.as_json, output=options.output)
    raise typer.Exit(0 if report["fit"] else 1)


def _refuse_contradictions(options: Options) -> None:
    with refusing("--port"):
        ObserverConfig(port=options.port)
    if options.listen and options.connect is not None:
        raise _wrong("--connect", "--listen only answers; give --connect on the other machine")
    if options.seconds is not None and (not options.listen or math.isnan(options.seconds)):
        raise _wrong("--seconds", f"must be a number, together with --listen, got {options.seconds}")
    if options.checkpoint is not None and options.checkpoint.exists() and not options.checkpoint.is_dir():
        raise _wrong("--checkpoint", f"{options.checkpoint} is not a folder")
    if options.run_dir is not None and not (options.run_dir / "records").is_dir():
        raise _wrong("--run-dir", f"{options.run_dir} is not a job's run directory: it has no folder records")
    if options.state_bytes is not None and options.parameters is not None:
        raise _wrong("--parameters", "give --state-bytes or --parameters, not both")
    if options.mesh is None and options.experts > 1:
        raise _wrong("--experts", "experts are carved out of a mesh: give --mesh too")


def _wrong(option: str, problem: str) -> typer.BadParameter:
    return typer.BadParameter(problem, param_hint=option)


def _plan(options: Options, *, devices: int) -> JobDescription:
    state_bytes = options.state_bytes
    if options.parameters is not None:
        if not math.isfinite(size := options.parameters * BYTES_PER_PARAMETER):
            raise _wrong("--parameters", f"must be a number of parameters, got {options.parameters}")
        state_bytes = int(size)
    given = {"--mesh": options.mesh, "--ranks": options.ranks, "--machines": options.machines}
    with refusing("--mesh" if options.experts == 1 else "--mesh, --experts"):
        mesh = None if options.mesh is None else mesh_of(options.mesh, options.experts)
    with refusing(", ".join(option for option, value in given.items() if value is not None)):
        world = None if mesh is None else len(mesh)
        ranks, machines = laid_out(world, options.ranks, options.machines, devices)
    return JobDescription(ranks, machines, state_bytes, mesh, options.experts > 1)


def _address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise _wrong("--connect", f"must be HOST:PORT, such as node1:41234, got {text!r}")
    return host.strip("[]"), int(port)


def _listen(options: Options) -> None:
    """Answer doctors on other machines, which report what they find."""
    from torchscout.cli.doctor.network import address_for_others, serve  # with it comes ZeroMQ

    def ready(port: int) -> None:
        where = f"{address_for_others(options.address)}:{port}"
        typer.echo(f"On every other machine run: scout doctor --connect {where}", err=True)

    until = None if options.seconds is None else time.monotonic() + options.seconds
    visits: list[dict[str, Any]] = []
    try:
        # Interruptible even if the parent process ignored SIGINT, as nohup does.
        with refusing("--address, --port", ScoutError, OSError), interruptible():
            for visit in serve(options.address, options.port, own_versions(), until, ready):
                visits.append({"host": visit.host, "versions": dict(visit.versions)})
                typer.echo(f"{visit.host} has connected.", err=True)
    except KeyboardInterrupt:
        pass
    report = {"host": host_name(), "visits": visits}
    shown = f"{counted(len(visits), 'machine')} connected."
    print_report(report, shown, as_json=options.as_json, output=options.output)
