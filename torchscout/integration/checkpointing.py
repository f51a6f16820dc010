"""One rank's checkpoints: capturing, certifying, copying, writing, and going back (paper, section 8).

Every rank carries out what the gate says after the same job-wide events, so that all hold the same
generations. What fails on the way is a sentence in ``status``; it moves no pointer on part of the job.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchscout.checkpoint import ledger, lock, placement, retention, shards
from torchscout.checkpoint.certify import Ballot, events_of
from torchscout.checkpoint.fetch import Links, fetch
from torchscout.checkpoint.gate import CheckpointGate, after
from torchscout.checkpoint.generation import Generation, Role
from torchscout.checkpoint.happening import Effects, Event, Lost, Outcome, Recovered
from torchscout.checkpoint.inventory import Member
from torchscout.checkpoint.memory import check_budget, memory_folder
from torchscout.checkpoint.outgoing import Outgoing
from torchscout.checkpoint.replicate import Replicator
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.state import Stateful, collect, expected_bytes, note, restore
from torchscout.config import CheckpointConfig
from torchscout.errors import CheckpointError, ScoutError
from torchscout.integration.addresses import own_address
from torchscout.integration.communicators import Communicators
from torchscout.integration.watching import Job
from torchscout.mesh import AXES, Mesh
from torchscout.recovery.retrieval import Decision, Failure, retrieve

__all__ = ["Checkpointing", "Resumption", "job_name"]

_COPIES = 3
"""Snapshots in memory: two whole ones, and one that is being written."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a job goes on from."""

    step: int
    """Steps that are done; 0 if there was nothing to go back to."""
    role: Role | None
    """What the checkpoint was trusted for; None if there was none."""
    source: str | None
    """Where this rank got its state."""
    reason: str
    """Why this one, in words."""


def job_name(directory: Path) -> str:
    """The same for every run with this folder, and for no other."""
    digest = hashlib.blake2b(str(directory).encode(), digest_size=6).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', directory.name)[:64] or 'job'}-{digest}".lstrip("-.")


class Checkpointing:
    """Checkpoints of a model and its optimizers, until ``close``."""

    def __init__(
        self,
        job: Job,
        config: CheckpointConfig,
        communicators: Communicators,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """On every rank, or with a ``ScoutError`` on none."""
        self._job, self._config, self._communicators = job, config, communicators
        self._model, self._optimizers = model, optimizers
        self._registered: dict[str, Stateful] = {}
        self._disk = Path(config.directory).absolute()
        self._name = job_name(self._disk)
        self._member = Member(
            job=self._name, mesh=_described(job.mesh), world_size=len(job.mesh), rank=job.rank
        )
        self._gate = CheckpointGate(persist_every=config.persist_every, keep=config.keep)
        self._former: CheckpointGate | None = None
        """What an earlier run has left, until this one goes back to it."""
        self._capture: Capture | None = None
        self._due: Callable[[], None] | None = None
        """What is to be done when the next step begins."""
        self._problems: list[str] = []
        self._reason = "nothing was captured yet"
        problem = None
        try:
            self._open()
        except (ScoutError, OSError) as error:
            problem = str(error)
        communicators.together(problem)
        self._meet()

    def register(self, name: str, stateful: Stateful) -> None:
        if name in self._registered:
            raise ValueError(f"state is registered as {name!r} already")
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise ValueError(f"{name!r} must have state_dict() and load_state_dict(), got {type(stateful)}")
        self._registered[name] = stateful

    def step_begins(self) -> None:
        """The step that was checked is over, and nothing of the next has happened: capture it."""
        due, self._due = self._due, None
        if due is not None:
            due()

    def fence(self) -> None:
        """Before every update."""
        if self._due is not None:
            self._due = None
            self._problems.append("no step was seen to begin, so that nothing was captured")
        self._snapshots.fence()

    def votes(self, outcome: Outcome) -> list[int]:
        """What this rank says at the end of a check; see ``integration.replaying.Certifier``."""
        writing, unwritten = self._gate.writing, False
        try:
            is_written = writing is None or self._outgoing.is_written(writing)
        except CheckpointError:
            is_written, unwritten = False, True
        lost = self._capture is not None and self._capture.problem is not None
        ballot = Ballot(outcome, self._gate.accepted, lost, not is_written, unwritten)
        return ballot.votes()

    def decide(self, step: int, counted: Sequence[int]) -> None:
        """The same on every rank."""
        self._problems += self._outgoing.problems()
        if self._former is not None:
            raise CheckpointError(
                f"{self._disk} has checkpoints of an earlier run, up to {self._former.latest}; nothing is "
                "captured. Call session.resume() before training, or give another directory"
            )
        if self._capture is not None and self._capture.problem is not None:
            self._problems.append(self._capture.problem)
        for event in events_of(self._gate, step, Ballot.counted(counted)):
            self._carry_out(event)
        self._write_down()

    def resume(self, *, start_over: bool = False) -> Resumption:
        """Go back to what algorithm 3 chooses; a ``CheckpointError`` on every rank if that cannot be had.

        With ``start_over`` a job of which nothing was ever verified begins again.
        """
        if self._former is None:
            return Resumption(0, None, None, "There is no checkpoint to go back to.")
        decision, wanted = self._chosen(self._former)
        if not wanted and start_over:
            return self._started_over(self._former, decision)
        if not wanted:
            raise CheckpointError(f"{decision.reason} To begin again, call session.resume(start_over=True).")
        links = Links(self._communicators.exchange, self._communicators.group)
        fetched = fetch(self._member, wanted, (self._memory, self._disk), links, shards.load)
        loaded = fetched.plan.generation
        assert loaded is not None, "fetch raises otherwise"
        problem = None
        try:
            restore(self._model, self._optimizers, self._registered, fetched.value.tree)
        except ScoutError as error:
            problem = str(error)
        self._communicators.together(problem)
        self._gate, self._former = self._former, None
        for passed, _ in fetched.plan.passed:
            self._carry_out(Lost(passed))
        self._carry_out(Recovered(loaded))
        self._write_down()
        source = fetched.plan.sources[self._member.rank].told(self._member.rank)
        role = Role.VERIFIED if loaded in self._gate.trusted else decision.role
        return Resumption(loaded.step, role, source, f"{decision.reason} {fetched.plan.reason}.")

    def status(self) -> Mapping[str, Any]:
        self._problems += self._outgoing.problems()
        return {
            "job": self._name,
            "memory": str(self._memory),
            "directory": str(self._disk),
            **{
                role.value: None if (each := getattr(self._gate, role.value)) is None else each.step
                for role in Role
            },
            "durable": [each.step for each in self._gate.durable],
            "poisoned": self._gate.poisoned,
            "held_seconds": None if self._capture is None else self._capture.held_seconds,
            "reason": self._reason,
            "problems": self._problems[-20:],
        }

    def close(self) -> None:
        self.step_begins()
        self._snapshots.close()
        self._outgoing.close()
        for each in self._locks:
            each.release()

    def _open(self) -> None:
        """What may fail on this rank alone."""
        job, config = self._job, self._config
        self._memory = memory_folder(self._name)
        self._locks = [lock.claim(folder, self._name, job.token) for folder in (self._memory, self._disk)]
        beside = sum(host == job.hosts[job.rank] for host in job.hosts)
        copies = (_COPIES + (1 if config.replicate else 0)) * beside
        allowed = check_budget(
            expected_bytes(self._model, self._optimizers), copies, config.memory_budget, self._memory
        )
        self._snapshots = Snapshots(
            self._memory,
            job.rank,
            copies=_COPIES,
            limit=allowed // copies,
            patience_seconds=config.patience_seconds,
        )
        self._replicator = None
        if config.replicate and len(set(job.hosts)) > 1:
            listens = ("0.0.0.0", 0)
            self._replicator = Replicator(job.rank, self._memory, job.token, listens=listens)

    def _meet(self) -> None:
        """Tell each other where copies go, and what an earlier run has left."""
        job, addresses = self._job, None
        if self._replicator is not None:
            addresses = [own_address(job.hosts, job.rank), self._replicator.address[1]]
        told = self._communicators.exchange({"address": addresses, "gate": self._read()})
        wards: Sequence[int] = ()
        if self._replicator is not None:
            self._replicator.connect([tuple(each["address"]) for each in told], job.hosts)
            wards = placement.wards(job.hosts, job.rank)
        self._outgoing = Outgoing(
            self._member,
            self._memory,
            self._disk,
            self._snapshots,
            self._replicator,
            wards,
            self._config.patience_seconds,
        )
        gates = [each["gate"] and CheckpointGate.from_json(each["gate"]) for each in told]
        self._is_blank = [gate is None for gate in gates]
        if not all(self._is_blank):
            self._former = ledger.reconcile(gates)

    def _read(self) -> Any:
        """What this rank finds written down, in whichever place it is newest."""
        gates = [self._read_in(folder) for folder in (self._memory, self._disk)]
        known = [gate for gate in gates if gate is not None]
        return ledger.newest(known).to_json() if known else None

    def _read_in(self, folder: Path) -> CheckpointGate | None:
        try:
            return ledger.read(folder, self._member.rank, job=self._name)
        except CheckpointError as error:
            self._problems.append(str(error))
            return None

    def _chosen(self, gate: CheckpointGate) -> tuple[Decision, list[Generation]]:
        """What to go back to, and should that be damaged: older ones, verified only."""
        failure = Failure.OTHER
        if gate.poisoned is not None:
            failure = Failure.SDC
        elif any(self._is_blank):
            failure = Failure.MACHINES_GONE
        decision = retrieve(failure, gate)
        if (first := decision.generation) is None:
            return decision, []
        return decision, [first, *(each for each in reversed(gate.trusted) if each < first)]

    def _started_over(self, gate: CheckpointGate, decision: Decision) -> Resumption:
        self._gate, self._former = gate, None
        self._carry_out(Recovered(None))
        self._write_down()
        return Resumption(0, None, None, f"{decision.reason} The job begins again, as was asked for.")

    def _carry_out(self, event: Event) -> None:
        self._gate, effects = after(self._gate, event)
        self._reason = effects.reason
        if effects.capture is not None:
            self._take(effects.capture, effects)
        self._retire(effects.retire)

    def _take(self, generation: Generation, effects: Effects) -> None:
        """Note now what a loader draws from; the rest of the step is still to come."""
        noted = note(self._model, self._optimizers, self._registered)
        role = Role.VERIFIED if effects.promote == generation else Role.LATEST

        def due() -> None:
            state = collect(self._model, self._optimizers, self._registered, noted)
            self._capture = self._snapshots.capture(self._member.at(generation), role, state)
            self._outgoing.take(self._capture, is_due=effects.persist == generation)

        self._due = due

    def _retire(self, generations: Sequence[Generation]) -> None:
        if not generations:
            return
        for generation in generations:
            self._snapshots.retire(generation)
        if self._replicator is not None:
            self._replicator.retire(generations)
        self._outgoing.later(lambda: retention.retire(self._disk, generations, self._member.rank))

    def _write_down(self) -> None:
        """In memory at once; files may take their time, and what they say is only older."""
        gate, rank, size = self._gate, self._member.rank, self._member.world_size
        ledger.write(self._memory, rank, gate, job=self._name, world_size=size)
        self._outgoing.later(lambda: ledger.write(self._disk, rank, gate, job=self._name, world_size=size))


def _described(mesh: Mesh) -> str:
    """Which rank has which place; what was saved under another layout is not loaded."""
    degrees = ", ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1)
    places = "\n".join(str(mesh.address_of(rank)) for rank in range(len(mesh)))
    digest = hashlib.blake2b(places.encode(), digest_size=6).hexdigest()
    return f"{degrees or 'one rank'} ({digest})"
