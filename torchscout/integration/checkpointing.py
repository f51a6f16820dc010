"""One rank's checkpoints: capturing, certifying, copying, writing, and going back (paper, section 8).

Every rank carries out what the gate says after the same job-wide events, so that all hold the same
generations. What fails on the way is a sentence in ``status``; it moves no pointer on part of the job.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from torchscout.checkpoint import ledger, lock, placement, retention, shards
from torchscout.checkpoint.certify import Ballot, events_of
from torchscout.checkpoint.fetch import Fetched, Links, fetch
from torchscout.checkpoint.forgetting import forget_old
from torchscout.checkpoint.gate import CheckpointGate, after
from torchscout.checkpoint.generation import Generation, Role
from torchscout.checkpoint.happening import Checked, Effects, Event, Lost, Outcome, Recovered
from torchscout.checkpoint.inventory import Member, Tier
from torchscout.checkpoint.ledger_tiers import LedgerTiers
from torchscout.checkpoint.memory import check_budget, memory_folder
from torchscout.checkpoint.outgoing import Outgoing
from torchscout.checkpoint.replicate import Replicator
from torchscout.checkpoint.shard_files import shard_files
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.state import OURS, Stateful, collect, expected_bytes, note, parameter_of, restore
from torchscout.config import CheckpointConfig
from torchscout.decision.fold import signed
from torchscout.decision.ownership import Ownership
from torchscout.errors import CheckpointError, ScoutError, UnavailableError
from torchscout.evidence.replay.keepsakes import Keepsakes
from torchscout.integration.addresses import listening_address
from torchscout.integration.communicators import Communicators
from torchscout.integration.coverage import Coverage
from torchscout.integration.former import Former, Remains
from torchscout.integration.resuming import Loaded, UnfitError, load_what_is_fit
from torchscout.integration.resumption import Resumption, Sweeping
from torchscout.integration.structure import surface_of
from torchscout.integration.watching import Job
from torchscout.log import Problems

__all__ = ["Checkpointing", "job_name"]


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
        unreplicated: Collection[str] = (),
        owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """On every rank, or with a ``ScoutError`` on none.

        Of the parameters ``unreplicated`` replicas do not keep equal ones. What is ``owned`` by this rank is
        kept by its name, in place of a parameter's that has the same.
        """
        self._job, self._config, self._communicators = job, config, communicators
        self._model, self._optimizers, self._owned = model, optimizers, owned
        self._unreplicated = {*unreplicated, *owned}
        self.keepsakes = Keepsakes()
        """What a sweep will replay, as far as there is room for it."""
        self._registered: dict[str, Stateful] = {f"{OURS}keepsakes": self.keepsakes}
        self._disk = Path(config.directory).absolute()
        self._name = job_name(self._disk)
        self._member = Member(
            job=self._name, mesh=job.mesh.summary(), world_size=len(job.mesh), rank=job.rank
        )
        self._coverage = Coverage()
        self._covered: Callable[[], str] = str
        self._ownership = Ownership()
        self._gate = self._configured(CheckpointGate())
        self._former: Former | None = None
        """What an earlier run has left, until this one goes back to it."""
        self._awaited: Generation | None = None
        """What was to be captured last."""
        self._capture: Capture | None = None
        """Of that; None until it has begun."""
        self._due: Callable[[], None] | None = None
        """What is to be done when the next step begins."""
        self._ledgers = LedgerTiers()
        self._retired: set[Generation] = set()
        """What the gate needs nowhere any more, as long as memory has it."""
        self._problems = Problems(f"rank {job.rank}: checkpoints")
        self._reason = "nothing was captured yet"
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            problem: str | None = "it could not begin"
            try:
                self._open()
                problem = None
            except (ScoutError, OSError) as error:
                problem = str(error)
            finally:
                self._together(problem)
            self._meet()
            undo.pop_all()

    def register(self, name: str, stateful: Stateful) -> None:
        if name in self._registered:
            raise ValueError(f"state is registered as {name!r} already")
        if name.startswith(OURS):
            raise ValueError(f"names that begin with {OURS!r} are not for others, got {name!r}")
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
            self._add_problems(["no step was seen to begin, so that nothing was captured"])
        self._snapshots.fence()

    def signature(self) -> int | None:
        """Of what was captured last, as far as replicas should have the same; None if it is not there."""
        if self._awaited is None or not self._is_captured() or self._capture is None:
            return None
        copied = {name: each for name, each in self._capture.digests.items() if self._is_copied(name)}
        return signed(xxhash.xxh3_64_intdigest(json.dumps(copied, sort_keys=True).encode()))

    def _is_copied(self, name: str) -> bool:
        """Whether replicas hold the same tensor under this name, as far as is known."""
        if (found := parameter_of(name)) is None or found[0] in self._unreplicated:
            return False
        parameter, slot = found
        surface = surface_of(parameter)
        return not any(map(self._ownership.is_owned, (surface, f"{surface}.{slot}")))

    def votes(self, outcome: Outcome, *, differs: bool) -> list[int]:
        """What this rank says at the end of a check; see ``integration.replaying.Certifier``."""
        writing, unwritten = self._gate.writing, False
        try:
            is_written = writing is None or self._outgoing.is_written(writing)
        except CheckpointError:
            is_written, unwritten = False, True
        is_lost = differs or not self._is_captured()
        return Ballot(outcome, self._gate.accepted, is_lost, not is_written, unwritten).votes()

    def go_by(
        self, coverage: Coverage, progress: Mapping[str, Stateful], covered: Callable[[], str] = str
    ) -> None:
        """What checks go over, and how far they are; see ``integration.replaying.Certifier``."""
        self._coverage, self._covered = coverage, covered
        ownership = progress.get("ownership")
        self._ownership = ownership if isinstance(ownership, Ownership) else self._ownership
        self._registered |= {f"{OURS}{name}": each for name, each in progress.items()}
        self._gate = self._configured(self._gate)

    def decide(self, step: int, counted: Sequence[int], *, counts: bool = True) -> None:
        """The same on every rank. Only a check that ``counts`` certifies, of those that are accepted."""
        self._add_problems(self._outgoing.problems())
        if self._former is not None:
            raise CheckpointError(
                f"{self._disk} has checkpoints of an earlier run, {self._former}; nothing is captured. "
                "Call session.resume() before training, or give another directory"
            )
        if self._capture is not None and self._capture.problem is not None:
            self._add_problems([self._capture.problem])
        for event in events_of(self._gate, step, Ballot.counted(counted)):
            if counts or not (isinstance(event, Checked) and event.outcome.accepted):
                self._carry_out(event)
        self._write_down()

    def resume(self, sweep: Sweeping | None = None, *, start_over: bool = False) -> Resumption:
        """Go back to what algorithm 3 chooses; a ``CheckpointError`` on every rank if that cannot be had.

        With ``start_over`` a job of which nothing was ever verified begins again.
        """
        if self._former is None:
            return Resumption(0, None, None, "There is no checkpoint to go back to.")
        decision, wanted = self._former.chosen()
        gate = self._former.gate
        assert gate is not None, "chosen() raises otherwise"
        if not wanted and start_over:
            return self._started_over(gate, decision.reason)
        if not wanted:
            raise CheckpointError(f"{decision.reason} To begin again, call session.resume(start_over=True).")
        decision = replace(decision, is_swept=decision.is_swept and self._config.sweep)
        try:
            loaded = load_what_is_fit(gate, decision, wanted, self._load, sweep)
        except UnavailableError as error:
            if start_over and gate.is_unproven:
                return self._started_over(gate, f"{error}.")
            raise
        except UnfitError as error:
            self._gate = gate
            for each in dict.fromkeys(error.lost):
                self._carry_out(Lost(each))
            self._write_down()
            raise
        return self._resumed(gate, loaded)

    def _load(self, wanted: Sequence[Generation]) -> Fetched[shards.Restored]:
        links = Links(self._communicators.exchange, self._communicators.group)
        fetched = fetch(self._member, wanted, (self._memory, self._disk), links, shards.load)
        self._add_problems(fetched.demoted)
        problem: str | None = f"{fetched.generation} could not be put back"
        try:
            restore(self._model, self._optimizers, self._registered, fetched.value.tree, self._owned)
            problem = None
        except ScoutError as error:
            problem = str(error)
        finally:  # whatever a user's load_state_dict raises: the others must not wait for this rank
            self._together(problem)
        return fetched

    def _resumed(self, gate: CheckpointGate, loaded: Loaded) -> Resumption:
        """From here on this run is the job."""
        fetched, decision = loaded.fetched, loaded.decision
        self._gate, self._former = gate, None
        for passed in loaded.lost:
            self._carry_out(Lost(passed))
        self._carry_out(Recovered(fetched.generation))
        self._gate = self._configured(self._gate)
        self._write_down()
        self._outgoing.later(self._tidy)
        if self._replicator is not None:  # whoever held the copy may be new, and have none
            self._replicator.send(fetched.path)
        swept = loaded.swept
        return Resumption(
            fetched.step,
            Role.VERIFIED if fetched.generation in self._gate.trusted else decision.role,
            fetched.plan.sources[self._member.rank].told(self._member.rank),
            f"{decision.reason} {fetched.plan.reason}.",
            None if swept is None else swept.sweep,
            None if swept is None else swept.unswept,
        )

    def _configured(self, gate: CheckpointGate) -> CheckpointGate:
        config = self._config
        recipes = self._coverage.recipes or config.recipes
        return replace(gate, recipes=recipes, persist_every=config.persist_every, keep=config.keep)

    def status(self) -> Mapping[str, Any]:
        self._add_problems(self._outgoing.problems())
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
            "copied": self._copied(),
            "held_seconds": None if self._capture is None else self._capture.held_seconds,
            "reason": self._reason,
            "lacking": self._coverage.lacking,
            "problems": list(self._problems),
        }

    def _add_problems(self, problems: Iterable[str]) -> None:
        """What lasts is said once, so that it does not push out what else went wrong."""
        self._problems.add(problems)

    def _copied(self) -> int | None:
        """The newest step of which another machine's memory has this rank's state."""
        held = frozenset() if self._replicator is None else self._replicator.held()
        return max((each.step for each in held), default=None)

    def close(self) -> None:
        with self._undo:
            self.step_begins()

    def _open(self) -> None:
        """What may fail on this rank alone."""
        job, config = self._job, self._config
        self._memory = memory_folder(self._name)
        for folder in (self._memory, self._disk):
            self._undo.callback(lock.claim(folder, self._name, job.token).release)
            shards.clean(folder)
        if config.forget_after_days is not None:
            forget_old(self._memory.parent, self._memory, config.forget_after_days)
        copies = placement.copies_beside(job.hosts, job.rank, replicate=config.replicate)
        expected = expected_bytes(self._model, self._optimizers, self._owned)
        allowed = check_budget(expected, copies, config.memory_budget, self._memory)
        # Of what its state will not need, though it should turn out twice as large.
        self.keepsakes.limit = max(0, allowed // copies - 2 * expected) if config.sweep else 0
        self._snapshots = Snapshots(
            self._memory,
            job.rank,
            copies=placement.SNAPSHOTS,
            limit=allowed // copies,
            patience_seconds=config.patience_seconds,
            protected=lambda: self._ledgers.named(Tier.MEMORY) | self._gate.in_memory,
        )
        self._undo.callback(self._snapshots.close)
        self._replicator, self._address = None, None
        if config.replicate and len(set(job.hosts)) > 1:
            listens, address = listening_address(job.hosts, job.rank)
            self._replicator = Replicator(job.rank, self._memory, job.token, listens=(listens, 0))
            self._undo.callback(self._replicator.close)
            self._address = [address, self._replicator.address[1]]
        self._remains = Remains.found((self._memory, self._disk), self._member.rank, self._name)
        self._ledgers = LedgerTiers(*self._remains.ledgers)
        self._add_problems(self._remains.problems)

    def _meet(self) -> None:
        """Tell each other where copies go, and what an earlier run has left."""
        job = self._job
        told = self._communicators.exchange({"address": self._address, "remains": self._remains.to_json()})
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
        self._undo.callback(self._outgoing.close)
        self._former = Former.of([Remains.from_json(each["remains"]) for each in told])

    def _together(self, problem: str | None) -> None:
        """Fail on every rank if this failed on any."""
        problems = self._communicators.exchange(problem)
        if told := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]:
            raise CheckpointError(f"{len(told)} of {len(problems)} ranks failed\n" + "\n".join(told))

    def _is_captured(self) -> bool:
        """Whether what the gate counts on is there; the one before it may be given up then, by any rank."""
        if self._awaited is None:
            return True
        return self._capture is not None and self._capture.wait(self._config.patience_seconds)

    def _started_over(self, gate: CheckpointGate, reason: str) -> Resumption:
        self._gate, self._former = gate, None
        for each in gate.trusted:
            self._carry_out(Lost(each))
        self._carry_out(Recovered(None))
        self._gate = self._configured(self._gate)
        self._write_down()
        return Resumption(0, None, None, f"{reason} The job begins again, as was asked for.")

    def _carry_out(self, event: Event) -> None:
        before = self._gate
        self._gate, effects = after(before, event)
        self._reason = effects.reason
        if effects.capture is not None:
            self._take(effects.capture, effects)
        self._retired |= {*effects.retire}
        self._ledgers.give_up(Tier.DISK, effects.retire)
        # What is in files need not be in another machine's memory as well.
        self._ledgers.give_up(Tier.MEMORY, before.in_memory.union(effects.retire) - self._gate.in_memory)

    def _take(self, generation: Generation, effects: Effects) -> None:
        """Note now what a loader draws from; the rest of the step is still to come."""
        self._awaited, self._capture, self._due = generation, None, None  # whatever becomes of it below
        noted = note(self._model, self._optimizers, self._registered, self._owned)
        role = Role.VERIFIED if effects.promote == generation else Role.LATEST

        def due() -> None:
            state = collect(self._model, self._optimizers, self._registered, noted, self._owned)
            self._capture = self._snapshots.capture(self._member.at(generation), role, state)
            self._outgoing.take(self._capture, is_due=effects.persist == generation)

        self._due = due

    def _tidy(self) -> None:
        """Delete what a killed run was about to delete: earlier generations that the job no longer knows."""
        gate, rank, size = self._gate, self._member.rank, self._member.world_size
        for tier, folder in ((Tier.MEMORY, self._memory), (Tier.DISK, self._disk)):
            needed = gate.held | self._ledgers.named(tier)
            retention.remove(
                each
                for each in shard_files(folder)
                if (each.holder, each.world_size) == (rank, size)
                and each.generation.lineage < gate.lineage
                and each.generation not in needed
            )

    def _write_down(self) -> None:
        """In memory at once; files may take their time. Neither depends on the other, and either may fail.

        Shards are deleted afterwards: see [Note: which ledger protects which shards].
        """
        gate, rank, size = self._gate, self._member.rank, self._member.world_size
        write = partial(
            ledger.write,
            rank=rank,
            gate=gate,
            job=self._name,
            world_size=size,
            coverage=self._covered() or None,
        )
        try:
            write(self._memory)
            self._ledgers.written(Tier.MEMORY, gate)
        except (CheckpointError, OSError) as error:
            self._add_problems([str(error)])
        self._leave_memory()

        def write_to_disk() -> None:
            write(self._disk)
            self._ledgers.written(Tier.DISK, gate)

        self._outgoing.later(write_to_disk)
        self._outgoing.later(self._leave_files)

    def _leave_memory(self) -> None:
        """Delete what no ledger counts on in memory."""
        free = self._ledgers.deletable(Tier.MEMORY)
        for generation in free & self._retired:
            self._snapshots.retire(generation)
        self._retired -= free
        if self._replicator is not None and free:
            self._replicator.retire(free)

    def _leave_files(self) -> None:
        """After a ledger was written to disk, or could not be."""
        self._leave_memory()
        if free := self._ledgers.deletable(Tier.DISK):
            retention.retire(self._disk, free, self._member.rank)
