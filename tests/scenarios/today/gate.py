"""Translates the histories of ``test_gate`` for today's gate, and its faults for the parts that capture and
write. The scripts that train run in ``gate_jobs``."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.support.incidents import incident_from
from tests.support.replica_ranks import identity, seal
from tests.support.small_job import until
from torchscout.checkpoint import ledger
from torchscout.checkpoint.background_writer import BackgroundWriter
from torchscout.checkpoint.gate import CheckpointGate, Generation, Outcome, Recovered, TrustLevel, transition
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.repeatability import NONDETERMINISTIC, REFUSED, UNDECIDED
from torchscout.decision.sdc import FAILED
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Verdict
from torchscout.errors import CheckpointError
from torchscout.session.checkpoints.certifier import (
    CheckCoverage,
    CheckVote,
    PromotionRule,
    events_of,
    outcome_of,
)
from torchscout.state.collect import StateParts, collect

if TYPE_CHECKING:
    from tests.scenarios.test_gate import Copy, Event, History, Write

LAYER = "layer.0"
Roles = tuple[int | None, int | None, int | None]


def trusted(history: History) -> Roles:
    """The steps of the latest, the candidate and the verified generation, if the job ends here."""
    gate = _followed(history).found_by_the_next_job()
    roles = (gate.latest, gate.candidate, gate.verified)
    return tuple(None if each is None else each.step for each in roles)  # type: ignore[return-value]


def in_files(history: History) -> tuple[int, ...]:
    return tuple(each.step for each in _followed(history).found_by_the_next_job().in_files)


@dataclass
class _Job:
    """What each rank knows, and what it will say at the next check."""

    history: History
    gates: list[CheckpointGate]
    sealed: dict[int, set[int]] = field(default_factory=dict)
    """The ranks that have captured a step; likewise below."""
    written: dict[int, set[int]] = field(default_factory=dict)
    failed: dict[int, set[int]] = field(default_factory=dict)

    def check(self, event: Event) -> None:
        rule = PromotionRule(self.history.coverage, self.history.catalog)
        worth = rule.worth(CheckCoverage(event.recipes, event.state))
        votes = [self._vote(rank, event).votes() for rank in range(len(self.gates))]
        counted = CheckVote.counted([max(column) for column in zip(*votes, strict=True)])
        for rank in event.known_to:
            for each in events_of(self.gates[rank], event.step, counted, worth):
                self.gates[rank], _ = transition(self.gates[rank], each)

    def reconnect(self) -> None:
        self.gates = [ledger.realigned(self.gates)] * len(self.gates)

    def recover(self, event: Event) -> None:
        found = self.found_by_the_next_job()
        (loaded,) = [each for each in found.held if each.step == event.step]
        for rank in event.known_to:
            self.gates[rank], _ = transition(found, Recovered(loaded, loaded in found.in_files))

    def found_by_the_next_job(self) -> CheckpointGate:
        gate, everybody = ledger.reconcile(self.gates), {*range(len(self.gates))}
        return ledger.settled(gate, lambda pending: self.sealed.get(pending.step) == everybody)

    def _vote(self, rank: int, event: Event) -> CheckVote:
        gate = self.gates[rank]
        found = event.found if rank in event.on else None
        return CheckVote(
            _outcome(found, self.history.require),
            gate.accepted_recipes,
            lost=gate.pending is not None and rank not in self.sealed.get(gate.pending.step, ()),
            writing=gate.writing is not None and rank not in self.written.get(gate.writing.step, ()),
            unwritten=gate.writing is not None and rank in self.failed.get(gate.writing.step, ()),
        )


def _followed(history: History) -> _Job:
    start = CheckpointGate(
        recipes=PromotionRule(history.coverage, history.catalog).recipes,
        persist_every=history.files_every,
        keep=history.older_files,
    )
    job = _Job(history, [start] * history.ranks)
    for event in history.events:
        if event.what == "check":
            job.check(event)
        elif event.what == "reconnected":
            job.reconnect()
        elif event.what == "recovered":
            job.recover(event)
        else:
            reports = {"sealed": job.sealed, "written": job.written, "write failed": job.failed}[event.what]
            reports[event.step] = {*event.on}
    return job


def _outcome(found: str | None, require: Iterable[str]) -> Outcome:
    """What one rank concludes from a check of the state in general and of one layer."""
    state, layer, more = _record(""), _record(LAYER), list[EvidenceRecord]()
    incidents: list[Incident] = []
    if found in _DIFFERENT:
        layer = _record(LAYER, exact(_DIFFERENT[found]))
    elif found in _NOTHING_OF_THE_LAYER:
        layer = _record(LAYER, reason=_NOTHING_OF_THE_LAYER[found])
    elif found in _A_SURFACE_OF_THE_LAYER:
        more = [_record(LAYER, reason=_A_SURFACE_OF_THE_LAYER[found])]
    elif found == "a rank is slow":
        more = [_record("", statistical([1.0, 1.0, 9.0]), kind=Manifestation.STRAGGLER)]
        incidents = [incident_from(more[0], (2,))]
    else:
        assert found is None, found
    return outcome_of([state, layer, *more], incidents, ("", LAYER), [*require])


_DIFFERENT = {"one rank differs": (1, 1, 2), "all ranks differ": (1, 2, 3)}
_NOTHING_OF_THE_LAYER = {
    "the layer was not called": "it was not called",
    "the layer does not repeat itself": f"{NONDETERMINISTIC}: atomics",
    "the layer cannot be replayed": f"{REFUSED}: it communicates",
}
_A_SURFACE_OF_THE_LAYER = {
    "a rank differed once": f"{UNDECIDED}: rank 1 differed once",
    "a replay failed": f"{FAILED} on rank 1: out of memory",
    "a gradient does not repeat itself": f"{NONDETERMINISTIC}: atomics",
    "a parameter has no gradient": "no gradient reached it",
}


def _record(
    layer: str,
    verdict: Verdict | None = None,
    *,
    reason: str | None = None,
    kind: Manifestation = Manifestation.SDC,
) -> EvidenceRecord:
    """Three ranks agree, unless there is another verdict or a reason why there is none."""
    return EvidenceRecord(
        step=1,
        surface=f"{layer or 'state'}/output",
        manifestation=kind,
        peers=(0, 1, 2),
        verdict=verdict or (exact((1, 1, 1)) if reason is None else None),
        reason=reason,
        layer=layer or None,
        mode="backward",
    )


def counted_as(copy: Copy, folder: Path) -> str:
    """Write a generation on the machine that keeps the other one's copy, and return what it is said to be."""
    memory, disk, step = folder / "memory", folder / "disk", 2
    memory.mkdir(mode=0o700)
    member = Member(job="job", mesh="replica=2", world_size=2, rank=0)
    snapshots = Snapshots(memory, 0)
    writer = BackgroundWriter(member, memory, disk, snapshots, None, (1,), 30.0 if copy.arrives else 0.3)
    own, theirs = (shards.path_of(disk, identity(rank, step), 0) for rank in (0, 1))
    if copy.arrives:
        seal(memory, 1, step).rename(shards.path_of(memory, identity(1, step), 0))
    if copy.disk_is_in_the_way:
        theirs.mkdir(parents=True)
    state = collect(StateParts(nn.Linear(4, 4), [], {}))
    said: list[str] = []
    try:
        snapshots.prepare(state.bytes)
        assert snapshots.wait_until_ready(60)
        capture = snapshots.capture(identity(0, step), TrustLevel.LATEST, state)
        snapshots.fence()
        assert capture.wait(60), capture.problem
        writer.take(capture, is_due=True)
        until(own.exists, "its own file is there")
        until(lambda: said.extend(writer.problems()) or said or theirs.is_file(), "the copy is dealt with")
        is_over = threading.Event()
        writer.later(is_over.set)  # its thread does one thing after the other
        until(is_over.is_set, "what follows from that is noted")
    finally:
        writer.close()
        snapshots.close()
    assert theirs.is_file() is not bool(said), said
    try:
        return "in files" if writer.is_written(Generation(step)) else "not in files yet"
    except CheckpointError:
        return "could not be written"


def captured(write: Write) -> str:
    """Write to the state while it is copied, after the copy began and before the next update."""
    if write.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for step in range(1, write.attempts + 1):
        with tempfile.TemporaryDirectory(prefix="torchscout-test-", dir="/dev/shm") as name:
            answer = _captured(write, Snapshots(Path(name), 0), step)
        if answer != "as it was":  # otherwise the write may have come too late
            break
    return answer


def _captured(write: Write, snapshots: Snapshots, step: int) -> str:
    is_cuda = write.device == "cuda"
    sizes = [(256 if is_cuda else 8) << 20, 16]  # the first takes milliseconds to copy, the second comes last
    model = nn.ParameterList(nn.Parameter(torch.zeros(size, device=write.device)) for size in sizes)
    try:
        state = collect(StateParts(model, [], {}))
        snapshots.prepare(state.bytes, model.parameters())
        assert snapshots.wait_until_ready(60)
        capture = snapshots.capture(identity(0, step), TrustLevel.LATEST, state)
        with torch.no_grad():
            (model[1].data if write.through_data else model[1]).fill_(1.0)
        snapshots.fence()
        if not capture.wait(60):
            assert snapshots.wait_until_ready(60)
            undisturbed = snapshots.capture(identity(0, step + 1), TrustLevel.LATEST, state)
            snapshots.fence()
            assert undisturbed.wait(60), f"there is another reason: {undisturbed.problem}"
            return "nothing"
        found = shards.load(capture.path).tree["parameters"].values()
        return "changed while it was copied" if any(each.any() for each in found) else "as it was"
    finally:
        snapshots.close()
