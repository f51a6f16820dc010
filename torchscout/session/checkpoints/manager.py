"""Captures, certifies, copies, writes and restores one rank's checkpoints (paper, section 8).

Every rank carries out the gate's effects of the same job-wide events, so that all ranks have the same
generations. Failures are reported in ``status``; they never change roles on only part of the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from torchscout.c3.fold import signed
from torchscout.checkpoint import ledger
from torchscout.checkpoint.background_writer import BackgroundWriter
from torchscout.checkpoint.folder import agree_on_name, claim, put_name
from torchscout.checkpoint.gate import (
    Changed,
    CheckpointGate,
    Event,
    Generation,
    Outcome,
    Recovered,
    Row,
    TrustLevel,
    transition,
)
from torchscout.checkpoint.ledger import Ledgers
from torchscout.checkpoint.memory import check_budget, forget_old, memory_folder, taken_root
from torchscout.checkpoint.replication import placement
from torchscout.checkpoint.resume.fetch import Fetched, fetch
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.communicators import Communicators, Job
from torchscout.config import CheckpointConfig
from torchscout.decision.types import Failure
from torchscout.errors import CheckpointError, ScoutError, UnavailableError, describe_error
from torchscout.log import Problems, log
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.session.checkpoints.certifier import (
    CheckCoverage,
    CheckVote,
    PromotionRule,
    certified_step,
    events_of,
)
from torchscout.session.checkpoints.replication import StateReplication
from torchscout.session.checkpoints.resumption import (
    WAYS_OUT,
    Loaded,
    NoUsableCheckpointError,
    PreviousRun,
    RankRemains,
    Resumption,
    Sweeping,
    load_first_usable,
    restore_together,
)
from torchscout.session.replay.coverage import RecipeCycle
from torchscout.state.collect import (
    SCOUT_PREFIX,
    Stateful,
    StateParts,
    collect,
    expected_bytes,
    note,
    put_at_rest,
    require_storable,
)
from torchscout.state.table import Equality, StateTable, StateView

__all__ = ["CheckpointManager"]

_COPY_SECONDS = 30.0
"""How long a job that resumes waits at most for the copies of the loaded state on other machines."""
_SETTLE_SECONDS = 2.0
"""How long a process that leaves waits at most for its last capture."""
_MEMORY_SECONDS = 30.0
"""How long attaching and registering wait at most for memory: to map and pin it would slow training down."""


class _Signed:
    """The signatures of all state at one moment."""

    def __init__(self, everything: StateView) -> None:
        self._names = [*everything.rows]
        self._pending = everything.sign(self._names)

    def difference(self, later: _Signed) -> str | None:
        """Return the name of a tensor that only one of them has, or that differs; None if there is none."""
        before, now = (dict(zip(each._names, each._pending.read(), strict=True)) for each in (self, later))
        return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


class CheckpointManager:
    """Checkpoints of a model and its optimizers, until ``close``."""

    captures = True

    def __init__(
        self,
        job: Job,
        config: CheckpointConfig,
        communicators: Communicators,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        table: StateTable,
        owned: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Call it on every rank; if one fails, all raise ``ScoutError``.

        ``table`` has their state. ``owned`` tensors of this rank are saved by name, in place of parameters of
        the same name.
        """
        self._job, self._config, self._communicators = job, config, communicators
        self._model, self._optimizers, self._owned = model, optimizers, owned
        self._table = table
        self._everything = table.view()
        self._parts: StateParts | None = None
        """Of the state as it was when these parameters and this version of the table were found:"""
        self._parts_of: tuple[list[int], int] = ([], 0)
        self.saved_calls = SavedCalls()
        """The calls that a sweep replays, as far as memory allows."""
        self._registered: dict[str, Stateful] = {f"{SCOUT_PREFIX}keepsakes": self.saved_calls}
        self._disk = Path(config.directory).absolute()
        name = agree_on_name(config.job, self._disk, communicators)
        self._member = Member(job=name, mesh=job.mesh.summary(), world_size=len(job.mesh), rank=job.rank)
        self._coverage, self._rule = RecipeCycle(), PromotionRule(config.coverage, None)
        self._covered: Callable[[], str] = str
        self._gate = self._configured(CheckpointGate())
        self._previous_run: PreviousRun | None = None
        """What an earlier run has left, until this one resumes from it or starts over."""
        self._awaited: Generation | None = None
        """The generation that was last due for capture."""
        self._capture: Capture | None = None
        """Its capture; None until it has begun."""
        self._due: Callable[[], None] | None = None
        """Starts the capture when the next step begins."""
        self._held: list[int] = []
        """Which parameters the model has when a capture becomes due."""
        self._checked: _Signed | None = None
        """The state that the check has seen which certifies what is due."""
        self._problems = Problems("checkpoints")
        self._reason = "nothing has been captured yet"
        self._is_flushed = False
        """Whether the newest sealed state was written to files when the job ended."""
        self._expected = self._allowed = 0
        """Bytes of a snapshot: what it probably takes, and what it may take."""
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._undo.close)
            self._together(self._claim)
            self._together(self._open)
            self._meet()
            undo.pop_all()

    def register(self, name: str, stateful: Stateful) -> None:
        """Include this object's state in checkpoints; raises ``ValueError`` if that is not possible."""
        if name in self._registered:
            raise ValueError(f"state is already registered as {name!r}")
        if name.startswith(SCOUT_PREFIX):
            raise ValueError(f"names that begin with {SCOUT_PREFIX!r} are reserved, got {name!r}")
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise ValueError(f"{name!r} must have state_dict() and load_state_dict(), got {type(stateful)}")
        require_storable(name, stateful)
        self._registered[name] = stateful
        self._prepare_memory(expected_bytes(self._state()))

    def step_begins(self) -> None:
        """Start the capture that is due. Call when a step begins, before anything of it has happened.

        A call of the model with other parameters, as with ``torch.func.functional_call``, is not the one that
        the state is captured for.
        """
        if self._due is not None and self._held == self._parameters_held():
            due, self._due = self._due, None
            due()

    def fence(self) -> None:
        """Wait for the copy of the state that an update changes. Call before every update."""
        if self._due is not None:
            self._due = None
            why = "the model was not called for training since the check, or only with other parameters"
            self._problems.add([f"nothing was captured, because {why}"])
        self._snapshots.fence()
        self._replication.update_begins()

    def signature(self) -> int | None:
        """Of the replicated part of the last capture; None if there is none."""
        if self._awaited is None or not self._is_captured() or self._capture is None:
            return None
        every = self._capture.digests
        digests = {name: every[name] for name in every if self._table.equality(name) is Equality.VOTED}
        return signed(xxhash.xxh3_64_intdigest(json.dumps(digests, sort_keys=True).encode()))

    @property
    def certified_step(self) -> int | None:
        return certified_step(self._gate)

    def votes(self, outcome: Outcome, *, differs: bool) -> list[int]:
        """This rank's vote at the end of a check; see ``certifier.Certifier``."""
        writing, unwritten = self._gate.writing, False
        try:
            is_written = writing is None or self._writer.is_written(writing)
        except CheckpointError:
            is_written, unwritten = False, True
        is_lost = differs or not self._is_captured()
        return CheckVote(
            outcome,
            self._gate.accepted_recipes,
            lost=is_lost,
            writing=not is_written,
            unwritten=unwritten,
            unready=not self._snapshots.is_ready(),
        ).votes()

    def set_coverage(
        self, coverage: RecipeCycle, progress: Mapping[str, Stateful], covered: Callable[[], str] = str
    ) -> None:
        """Set what the checks cover and their saved progress; see ``certifier.Certifier``."""
        self._coverage, self._covered = coverage, covered
        self._rule = PromotionRule(self._config.coverage, coverage.recipes)
        self._registered |= {f"{SCOUT_PREFIX}{name}": each for name, each in progress.items()}
        self._gate = self._configured(self._gate)

    def decide(self, step: int, counted: Sequence[int], check: CheckCoverage) -> None:
        """Act on a check's combined votes; see ``certifier.Certifier``."""
        self._replication.checked()
        self._problems.add(self._writer.problems())
        if self._previous_run is not None:
            raise CheckpointError(
                f"{self._disk} has checkpoints of an earlier run, {self._previous_run}, so nothing is "
                "captured. Call session.resume() before training, or use another directory"
            )
        if self._capture is not None and self._capture.problem is not None:
            self._problems.add([self._capture.problem])
        vote = CheckVote.counted(counted)
        self._rule.checked(vote.outcome, check)
        if vote.unready and vote.outcome.accepted:
            self._snapshots.skip("a rank has no memory ready for it")
            self._problems.add(filter(None, [self._snapshots.problem]))
        for event in events_of(self._gate, step, vote, self._rule.worth(check)):
            self._carry_out(event)
        self._write_ledgers()

    def state(self) -> dict[str, Any]:
        """See ``certifier.Certifier``."""
        return self._gate.to_json()

    def agree(self, states: Sequence[Any]) -> None:
        """Continue from what all ranks can rely on; see ``certifier.Certifier``."""
        self._gate = ledger.realigned([*map(CheckpointGate.from_json, states)])
        self._reason = "checks continue after a failure: the cycle starts again"
        if self._gate.pending is None:  # what was being captured on some ranks only is not compared
            self._awaited = self._capture = self._due = None
        self._write_ledgers()

    def has_verified(self) -> bool:
        """Whether there is a verified checkpoint; may be called from any thread."""
        return self._gate.verified is not None

    def resume(
        self, sweep: Sweeping | None, *, start_over: bool, failure: Failure, reshard: bool = False
    ) -> Resumption:
        """Load the checkpoint that algorithm 3 selects after this failure, on every rank.

        If none can be loaded, all raise ``CheckpointError``, or with ``start_over`` start from step 0. With
        ``reshard`` the ranks that saved it may have had another layout.
        """
        resharding, load, folders = None, self._load, (self._memory, self._disk)
        if reshard:
            from torchscout.session.checkpoints.resharding import Resharding  # few jobs need it

            resharding = Resharding(self._member, folders, self._communicators, self._state, self._load)
            self._previous_run, load = resharding.previous_run() or self._previous_run, resharding.load
        if self._previous_run is None:
            return Resumption(0, None, None, "There is no checkpoint to go back to.")
        gate = self._previous_run.gate
        try:
            decision, wanted = self._previous_run.chosen(failure)
            decision = replace(decision, is_swept=decision.is_swept and self._config.verify_on_resume)
            loaded = load_first_usable(gate, decision, wanted, load, sweep)
        except NoUsableCheckpointError as error:
            self._gate = gate
            for each in dict.fromkeys(error.lost):
                self._carry_out(Changed("lost", each))
            # Unlike a new job, the next run must ask explicitly to start over.
            self._gate = replace(self._gate, poisoned=self._gate.step)
            self._write_ledgers()
            raise
        except UnavailableError as error:
            reason = f"{str(error).rstrip('.')}."
            if start_over:
                self._start_over(gate)
                return Resumption(0, None, None, f"{reason} The job starts from step 0, as requested.")
            raise UnavailableError(reason, WAYS_OUT.format(folder=self._disk)) from None
        resumed = self._resumed(gate, loaded)
        return resumed if resharding is None else resharding.described(resumed)

    def _load(self, wanted: Sequence[Generation]) -> Fetched[Any]:
        links = Links(self._communicators.exchange, self._communicators.group)
        fetched = fetch(self._member, wanted, (self._memory, self._disk), links, shards.load)
        self._problems.add(fetched.demoted, are_logged=True)
        saved = fetched.value
        restore_together(fetched.generation, self._state(), saved.tree, self._communicators, saved.signatures)
        return fetched

    def _resumed(self, gate: CheckpointGate, loaded: Loaded) -> Resumption:
        """Continue from the loaded generation: reset the gate and write the ledgers."""
        fetched = loaded.fetched
        self._gate, self._previous_run = gate, None
        self._problems.add(fetched.demoted if fetched.path is None else ())
        for passed in loaded.lost:
            self._carry_out(Changed("lost", passed))
        self._carry_out(Recovered(fetched.generation, fetched.plan.in_files))
        self._gate = self._configured(self._gate)
        self._write_ledgers()
        self._writer.later(lambda: self._ledgers.delete_other_ranks(self._gate))
        if fetched.path is not None:  # its holder may be new and have no copy
            self._replication.copy(fetched.path, min(_COPY_SECONDS, self._config.timeout_seconds))
        return loaded.resumption(self._member.rank, is_trusted=fetched.generation in self._gate.trusted)

    def _configured(self, gate: CheckpointGate) -> CheckpointGate:
        config = self._config
        recipes = self._rule.recipes or config.checks_per_cycle
        return replace(gate, recipes=recipes, persist_every=config.persist_every, keep=config.keep_verified)

    def status(self) -> Mapping[str, Any]:
        self._problems.add(self._writer.problems())
        return {
            "job": self._member.job,
            "memory": str(self._memory),
            "directory": str(self._disk),
            **self.metrics(),
            "promotion": self._rule.promotion,
            "held_seconds": None if self._capture is None else self._capture.held_seconds,
            "reason": self._reason,
            "lacking": self._coverage.lacking,
            "problems": list(self._problems),
        }

    def metrics(self) -> Mapping[str, Any]:
        """See ``Session.metrics``."""
        return {
            **self._gate.steps(),
            "copied": self._replication.newest,
            "captures": {**self._snapshots.totals.to_json(), "skipped": self._snapshots.skipped},
            "copies": self._replication.totals.to_json(),
            "problems": len(self._problems),
        }

    def close(self) -> None:
        """Free the memory of what ``finish`` has written to files, and release everything. Idempotent."""
        self._undo.close()

    def finish(self) -> None:
        """Write the newest state to files, because the job ends on this rank.

        No step begins with what is due, and the program may have loaded other weights since the last step. So
        it is captured only if it is what the check has seen.
        """
        if self._due is not None and (changed := self._changed_since_check()):
            self._due = None
            end = f"the state after step {self._gate.step} is not kept, because no step began with it"
            self._problems.add([f"{end} and {changed} was changed after the check"])
        self.step_begins()
        self._is_flushed = self.flush()
        if self._capture is not None and self._capture.problem is not None:  # no further check says so
            self._problems.add([self._capture.problem])

    def settle(self) -> None:
        """Let the last capture be sealed in memory although no update follows, and wait shortly for that.
        Thread-safe."""
        self._snapshots.settle()
        if self._capture is not None:
            self._capture.wait(_SETTLE_SECONDS)

    def flush(self) -> bool:
        """Write the newest sealed state to files and wait for it, within ``timeout_seconds``.

        Does not need other ranks: writes first what all ranks know to be sealed, then the last capture.
        Returns whether all of it is in files. Thread-safe.
        """
        gate, deadline = self._gate, time.monotonic() + self._config.timeout_seconds
        self._snapshots.settle()  # there may be no further update
        is_captured = self._capture is not None and self._capture.wait(self._config.timeout_seconds)
        newest = (gate.latest, gate.pending if is_captured else None)
        wanted = [each for each in newest if each is not None and each not in gate.in_files]
        if not wanted:
            return True
        problem = self._writer.flush(wanted, max(0.0, deadline - time.monotonic()))
        if problem is not None:
            log.error(
                "could not write %s to %s: %s; sealed checkpoints remain in %s",
                *(wanted[-1], self._disk, problem, self._memory),
            )
        elif self._member.rank == 0:
            log.info("the checkpoint of %s is in %s", wanted[-1], self._disk)
        return problem is None

    def _together(self, part: Callable[[], None]) -> None:
        """Set up a part, and raise ``CheckpointError`` on all ranks if that fails on one of them."""
        problem: str | None = "checkpoints could not be set up"
        try:
            part()
            problem = None
        except (ScoutError, OSError) as error:
            problem = str(error)
        finally:
            self._communicators.together(problem, CheckpointError)

    def _claim(self) -> None:
        """Claim the folders and the memory of this job, before any rank frees what its last run has left."""
        job, config = self._job, self._config
        self._memory = memory_folder(self._member.job)
        is_first_here = job.hosts.index(job.hosts[job.rank]) == job.rank
        self._problems.add(filter(None, [taken_root(self._memory.parent)]), are_logged=not is_first_here)
        for folder in (self._memory, self._disk):
            lock = claim(folder, self._member.job, job.token)
            self._undo.callback(lock.release)
            self._problems.add(filter(None, [lock.problem]), are_logged=job.rank != 0)
        if config.forget_after_days is not None:
            forget_old(self._memory.parent, self._memory, config.forget_after_days)
        self._expected = expected_bytes(self._state())
        copies = placement.copies_beside(job.hosts, job.rank, replicate=config.replicate)
        self._allowed = check_budget(self._expected, copies, config.memory_budget, self._memory) // copies

    def _open(self) -> None:
        """Set up everything else that may fail on one rank only."""
        job, config, expected, allowed = self._job, self._config, self._expected, self._allowed
        for folder in (self._memory, self._disk):
            shards.clean(folder)
        put_name(self._disk, self._member.job)
        self._undo.callback(self._free_memory)
        # What is left even if the state turns out to be twice as large as expected.
        self.saved_calls.limit = max(0, allowed - 2 * expected) if config.verify_on_resume else 0
        self._snapshots = Snapshots(
            self._memory,
            job.rank,
            copies=placement.SNAPSHOTS,
            limit=allowed,
            timeout_seconds=config.timeout_seconds,
            protected=lambda: self._ledgers.needed(Tier.MEMORY, self._gate),
        )
        self._undo.callback(self._snapshots.close)
        self._prepare_memory(expected)
        self._replication = StateReplication(job, self._memory, wanted=config.replicate)
        self._undo.callback(self._replication.close)
        self._remains = RankRemains.found((self._memory, self._disk), self._member)
        self._ledgers = Ledgers(self._member, self._memory, self._disk, self._remains.ledgers)
        self._problems.add(self._remains.problems)

    def _prepare_memory(self, expected: int) -> None:
        # Saved inputs are usually a small part of the state. If they are not, memory is prepared again.
        saved = min(self.saved_calls.limit, expected // 4)
        self._snapshots.prepare(expected + saved, self._state().tensors)
        self._snapshots.wait_until_ready(_MEMORY_SECONDS)

    def _meet(self) -> None:
        """Exchange addresses for copies, and what an earlier run has left."""
        own = {"address": self._replication.address, "remains": self._remains.to_json()}
        gathered = self._communicators.exchange(own)
        held_ranks = self._replication.connect([each["address"] for each in gathered])
        replicator = self._replication.replicator
        self._problems.add(filter(None, [self._replication.problem]))
        timeout = self._config.timeout_seconds
        self._writer = BackgroundWriter(
            self._member, self._memory, self._disk, self._snapshots, replicator, held_ranks, timeout
        )
        self._undo.callback(self._writer.close)
        self._previous_run = PreviousRun.of([RankRemains.from_json(each["remains"]) for each in gathered])
        if (previous := self._previous_run) is not None and previous.is_nothing:
            log.info("an earlier run ended before its first checkpoint was complete")
            self._start_over(previous.gate)

    def _changed_since_check(self) -> str | None:
        """Return the name of a tensor that is not what the check has seen; None if all are."""
        try:
            before, now = self._checked, _Signed(self._everything)
            return "something that could not be read" if before is None else before.difference(now)
        except (ValueError, RuntimeError) as error:
            return f"something that cannot be read ({describe_error(error)})"

    def _is_captured(self) -> bool:
        """Whether the awaited generation is sealed on this rank."""
        capture, seconds = self._capture, self._config.timeout_seconds
        return self._awaited is None or (capture is not None and capture.wait(seconds))

    def _start_over(self, gate: CheckpointGate) -> None:
        self._gate, self._previous_run = gate, None
        for each in gate.trusted:
            self._carry_out(Changed("lost", each))
        self._carry_out(Recovered(None))
        self._gate = self._configured(self._gate)
        self._write_ledgers()
        self._writer.later(lambda: self._ledgers.delete_other_ranks(self._gate))

    def _carry_out(self, event: Event) -> None:
        self._gate, effects = transition(self._gate, event)
        self._reason = effects.reason
        if effects.capture is not None:
            self._rule.captured(effects.capture.generation)
            self._take(effects.capture)
        promoted = None if effects.promoted is None else self._rule.promoted(effects.promoted)
        if promoted is not None and self._member.rank == 0:
            log.info("%s", promoted)

    def _take(self, row: Row) -> None:
        """Record loader positions and random state now, and capture the rest when the next step begins."""
        generation = row.generation
        self._awaited, self._capture, self._due = generation, None, None  # also if noting fails
        noted = note(self._state())
        self._held, self._checked = self._parameters_held(), None
        with suppress(ValueError, RuntimeError):  # then nothing is captured unless another step begins
            self._checked = _Signed(self._everything)
        role = TrustLevel.CANDIDATE if row.due else TrustLevel.LATEST
        role = TrustLevel.VERIFIED if self._gate.recipes is None else role

        def due() -> None:
            found = collect(self._state(), noted)
            self._capture = self._snapshots.capture(self._member.at(generation), role, found)
            self._writer.take(self._capture, is_due=row.due)

        self._due = due

    def _parameters_held(self) -> list[int]:
        put_at_rest(self._model)
        return [*map(id, self._model.parameters())]

    def _state(self) -> StateParts:
        """The parts as they are now."""
        held = self._parameters_held()
        self._table.refresh()
        if self._parts is None or self._parts_of != (held, self._table.version):
            self._parts_of = (held, self._table.version)
            self._parts = StateParts(
                self._model, self._optimizers, self._registered, self._owned, self._table
            )
        return self._parts

    def _write_ledgers(self) -> None:
        """Write to memory now and to disk in the background, and delete what neither ledger names."""
        gate, covered = self._gate, self._covered() or None
        try:
            self._ledgers.write(Tier.MEMORY, gate, covered)
        except (CheckpointError, OSError) as error:
            self._problems.add([str(error)])
        self._delete_from_memory()
        self._writer.later(lambda: self._ledgers.write(Tier.DISK, gate, covered))
        self._writer.later(self._delete_from_memory)
        self._writer.later(lambda: self._ledgers.delete_unneeded(Tier.DISK, self._gate))

    def _delete_from_memory(self) -> None:
        """Free the snapshots that are no longer needed, and have their copies deleted where they are kept."""
        replicator = self._replication.replicator
        copied = frozenset[Generation]() if replicator is None else replicator.held()
        unneeded = copied.union(self._snapshots.sealed) - self._ledgers.needed(Tier.MEMORY, self._gate)
        for each in unneeded:
            self._snapshots.retire(each)
        if replicator is not None and unneeded:
            replicator.retire(unneeded)
        with suppress(CheckpointError):  # the next ledger tries again
            self._ledgers.delete_unneeded(Tier.MEMORY, self._gate)

    def _free_memory(self) -> None:
        """Free the memory of checkpoints that are also in files. Called last."""
        try:
            if self._is_flushed:
                self._ledgers.free_memory(self._gate)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoints remain in %s: %s", self._memory, error)
