"""All that the doctor does: gather the facts, then say what each means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.storage.memory import memory_root
from torchscout.cli.doctor.checks import devices, installation, layout, network, repeats, storage, system
from torchscout.cli.doctor.facts import Clock, Folder, Installed, Limits, Met, Reached, Stacks, TorchFacts
from torchscout.cli.doctor.finding import Finding, skipped
from torchscout.cli.doctor.plan import Plan
from torchscout.cli.doctor.probes import system as kernel
from torchscout.cli.doctor.probes.installation import FRAMEWORKS, installed
from torchscout.cli.doctor.probes.run_records import not_repeating
from torchscout.cli.doctor.probes.storage import folder_at
from torchscout.cli.doctor.probes.torch_facts import ask_torch
from torchscout.config import ObserverConfig
from torchscout.observer.record.directory import records_home

__all__ = ["Facts", "findings_of", "gathered"]


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
        from torchscout.cli.doctor.probes.network import meet, reach_own_board

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


def findings_of(facts: Facts, plan: Plan) -> list[Finding]:
    """In the order in which one would fix them."""
    return [
        installation.python(facts.installed),
        installation.torch(facts.installed, facts.torch),
        installation.restarts(facts.torch, os.environ),
        devices.backends(facts.torch),
        devices.cuda(facts.torch),
        devices.triton(facts.torch),
        repeats.attention(facts.torch),
        installation.frameworks(facts.installed, FRAMEWORKS),
        installation.curve(facts.installed),
        *_connections(facts, plan),
        system.stacks(facts.stacks),
        system.monotonic(facts.clock),
        system.open_files(facts.limits, plan.world_size),
        system.file_size(facts.limits, plan.state_bytes),
        storage.memory(facts.memory, plan),
        storage.private([facts.records, facts.memory]),
        storage.directory(facts.directory, plan),
        repeats.surfaces(facts.not_repeating),
        *layout.fits(plan),
        *layout.peers(plan.mesh, has_experts=plan.has_experts),
    ]


def _connections(facts: Facts, plan: Plan) -> list[Finding]:
    if facts.reached is None:
        return [skipped("board", "it needs pyzmq with CURVE")]
    own = network.board(facts.reached, plan.machines)
    if facts.met is None:
        return [
            own,
            skipped("other machine", "run scout doctor --listen there, and --connect HOST:PORT here"),
        ]
    return [
        own,
        network.other_machine(facts.met),
        network.other_versions(facts.met, facts.installed.versions),
        network.other_clock(facts.met),
    ]
