"""Handles the incidents of ``test_policy`` with today's session, observer and restart plan.

An answer is read from what is done: whether the worker leaves, and the restart plan that it leaves behind.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import RankError, run_ranks
from tests.support.small_job import until
from torchscout import CheckpointConfig, ObserverConfig, RecoveryConfig, ReplayConfig, enable_resiliency
from torchscout.checkpoint.gate import (
    Changed,
    Checked,
    CheckpointGate,
    Outcome,
    select_checkpoint,
    transition,
)
from torchscout.communicators import Job
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankReport, Window
from torchscout.decision.sdc import SdcDiagnosis
from torchscout.decision.straggler import PhaseStragglers, RankStragglers
from torchscout.decision.timings import PeerTimes, Work
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh
from torchscout.observer.late_decision import LateDecision
from torchscout.observer.spec import ObserverSpec
from torchscout.run.folder import Identity
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan
from torchscout.session import recovery
from torchscout.session.recovery import EXIT_STATUS, Recovery

if TYPE_CHECKING:
    from tests.scenarios.test_policy import Event, History, Seen

WORDS = {
    Action.CONTINUE: "continue",
    Action.RESTART: "restart",
    Action.INSPECT: "inspect",
    Action.PREFLIGHT: "preflight",
    Action.REPLACE: "replace",
    Action.STOP: "stop",
}
ACTIONS = {word: action for action, word in WORDS.items()}
KINDS = {each.value: each for each in Manifestation}
SURFACES = {"crash": "process", "divergence": "fingerprint/world", "sdc": "layer.3/output"}
DAY = 86_400.0


def done(history: History, folder: Path, *, by_observer: bool = False) -> list[str]:
    """Let one life of the job after the other suffer its incident; return what is done about each."""
    answers: list[str] = []
    restarted = 0
    for life, event in enumerate(history.events):
        worker = _worker(event.machines, folder, life, history)
        worker.began = time.monotonic() - DAY * (event.day - restarted)
        if not event.resuming:
            worker.plan_was_used()
        handle = _handled_by_observer if by_observer else _handled
        answers.append(handle(worker, incident_of(event)))
        restarted = event.day if answers[-1] != "nothing" else restarted
        if RestartPlan.read(folder).is_stopped:
            break  # there is no next life
    return answers


def loaded(history: History, folder: Path) -> str:
    """Return which checkpoint is loaded after the last restart."""
    if done(history, folder)[-1] == "nothing":
        return "the job goes on with its state"
    gate = CheckpointGate(recipes=2)
    for step in range(1, 6):
        gate, effects = transition(gate, Checked(step, Outcome.HEALTHY))
        for kind in ("sealed", *(["written"] if effects.capture.due else [])):
            gate, _ = transition(gate, Changed(kind, effects.capture.generation))
    assert None is not gate.verified != gate.latest, "or it does not matter which is loaded"
    chosen = select_checkpoint(RestartPlan.read(folder).failure, gate)
    assert chosen.role is not None
    return chosen.role.value + ", if a sweep finds nothing" * chosen.tentative


def job_with_wrong_weights(act: Sequence[str], folder: Path) -> str:
    """Train on three ranks, of which one changes a weight of its own."""
    try:
        weights = run_ranks(_train, 3, act, folder, timeout=60)
    except RankError as error:
        left = f"exited without an answer, exit code {EXIT_STATUS}"
        if error.failures != dict.fromkeys(range(3), left) or not (folder / "changed").exists():
            raise
        return "all ranks leave, to be restarted"
    assert weights[0] == weights[2] != weights[1]
    return "all ranks train to the end, one of them with wrong weights"


def _train(rank: int, act: Sequence[str], folder: Path) -> list[float]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1),
        observer=None,
        checkpoint=CheckpointConfig(folder / "checkpoints"),
        run_dir=folder / "run",
        recovery=RecoveryConfig(act=act),
    )
    first = next(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    has_verified = torch.zeros(1)
    while not has_verified:  # to restart from
        step()
        has_verified[0] = session.status()["checkpoint"]["verified"] is not None
        dist.all_reduce(has_verified, dist.ReduceOp.MIN)
        assert session.step < 50
    if rank == 1:
        with torch.no_grad():
            first.view(-1)[3] += 1e-3
        (folder / "changed").touch()
    step()
    _wait_for_what_is_decided(folder / "run")
    weights: list[float] = first.detach().flatten().tolist()
    session.close()
    return weights


def _wait_for_what_is_decided(run_dir: Path) -> None:
    until(lambda: bool(IncidentLog.read(run_dir).decisions), "a decision is recorded", 20.0)
    if any(each.is_carried_out for each in IncidentLog.read(run_dir).decisions):
        time.sleep(20)  # this rank leaves meanwhile


def agreed(seen: Seen, folder: Path, permissions: Sequence[Collection[str]]) -> list[str]:
    """Return the action of the incident that is concluded, and what is done about it with each permission."""
    incident = _concluded(seen)
    answers = [WORDS[incident.action]]
    for number, act in enumerate(permissions):
        settings = SimpleNamespace(act=act, restart_costs=None, has_verified=True)
        answers.append(_handled(_worker(seen.machines, folder / str(number), 0, settings), incident))
    return answers


def _worker(machines: Sequence[str], folder: Path, life: int, history: History | SimpleNamespace) -> Recovery:
    costs = {} if history.restart_costs is None else {"restart_seconds": history.restart_costs}
    run = Identity(str(folder / f"run-{life}"))
    job = Job(0, Mesh.grid(replica=len(machines), hosts=machines), machines, "t" * 16, run)
    checkpoints = SimpleNamespace(has_verified=lambda: history.has_verified, settle=lambda: None)
    config = RecoveryConfig(act=tuple(history.act), **costs)
    return Recovery(job, config, RestartPlan.read(folder), folder, checkpoints)  # type: ignore[arg-type]


def _handled(worker: Recovery, incident: Incident) -> str:
    left: list[int] = []
    worker.job, worker.exit = replace(worker.job, rank=incident.logged_by), left.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_SECONDS_TO_REPORT", 0.0)
        worker.handle(incident)
    assert left in ([], [EXIT_STATUS])
    return _what_is_planned(worker, has_left=bool(left))


def _handled_by_observer(worker: Recovery, incident: Incident) -> str:
    """The trainer has ended, so that its observer decides in its place."""
    spec = ObserverSpec(
        rank=incident.logged_by,
        size=len(worker.job.hosts),
        record="/record",
        run=worker.job.run,
        token=worker.job.token,
        config=ObserverConfig(),
        recovery=worker.config,
        plan=worker.plan,
        began=worker.began,
        plan_folders=tuple(map(str, worker.plan_folders)),
    )
    late = LateDecision(spec)
    must_end = late.must_end(incident)
    late.trainer_ended()
    return _what_is_planned(worker, has_left=must_end)


def _what_is_planned(worker: Recovery, *, has_left: bool) -> str:
    assert worker.folder is not None
    plan = RestartPlan.read(Path(worker.folder))
    assert (len(plan.restarts) > len(worker.plan.restarts)) == has_left, "whoever leaves has planned it"
    if not has_left:
        return "nothing"
    last = plan.restarts[-1]
    assert plan.is_stopped == (last.action is Action.STOP)
    if last.action is Action.REPLACE:
        assert {*last.hosts} <= {*plan.excluded}
        return f"replace {' and '.join(last.hosts)}"
    assert plan.excluded == worker.plan.excluded
    return WORDS[last.action]


def incident_of(event: Event) -> Incident:
    """The incident of this event, with a record that shows as much as the policy looks at."""
    finding, ranks = event.finding, tuple(range(len(event.machines)))
    outliers = () if event.undecided else finding.ranks
    times = tuple(10.0 * (event.work_takes if rank in outliers else 1.0) for rank in ranks)
    surface = (
        f"time/{event.work}" if finding.kind == "straggler" else SURFACES.get(finding.kind, "coordinate")
    )
    status = Status.INCONCLUSIVE if event.undecided else Status.ATTRIBUTED
    kind = KINDS.get(finding.kind, Manifestation.HANG)
    record = EvidenceRecord(
        step=0 if event.resuming else event.step,
        surface=surface,
        manifestation=kind,
        peers=ranks,
        verdict=Verdict(status, outliers, times),
    )
    others = replace(record, verdict=Verdict(Status.AGREE, (), (10.0,) * len(ranks)))
    return Incident(
        manifestation=kind,
        scope=Scope(finding.scope.replace(" ", "_")),
        step=record.step,
        ranks=finding.ranks,
        hosts=tuple(dict.fromkeys(event.machines[rank] for rank in finding.ranks)),
        records=(others, record) if event.others_first else (record,),
        action=ACTIONS[finding.action],
        sentence="Something happened.",
        slowdown=event.step_takes if kind is Manifestation.STRAGGLER else None,
    )


def _concluded(seen: Seen) -> Incident:
    """Let today's diagnoses conclude what happened."""
    mesh = Mesh.grid(replica=len(seen.machines), hosts=seen.machines)
    what, ranks = seen.what, {*seen.ranks}
    if what == "wrong numbers":
        signatures = [9 if rank in ranks else 7 for rank in range(len(mesh))]
        (incident,) = SdcDiagnosis(mesh).diagnose([_compared(exact(signatures), range(len(mesh)))])
        return incident
    if what == "wrong numbers of tensor-parallel partners":
        # Even ranks are the first halves of tensor-parallel pairs, and peers of each other.
        mesh = Mesh.grid(replica=len(mesh) // 2, tensor=2, hosts=seen.machines)
        (first, partner), peers = sorted(ranks), range(0, len(mesh), 2)
        record = _compared(exact([9 if rank == first else 7 for rank in peers]), peers)
        (incident,) = SdcDiagnosis(mesh).diagnose([record], elsewhere=(partner,))
        return incident
    if what.startswith("slow"):
        return _slow(seen, mesh)
    return _stopped(seen, mesh)


def _compared(verdict: Verdict, peers: Sequence[int]) -> EvidenceRecord:
    return EvidenceRecord(
        step=40,
        surface="layer.3/output",
        manifestation=Manifestation.SDC,
        peers=tuple(peers),
        verdict=verdict,
        mode="forward",
    )


def _slow(seen: Seen, mesh: Mesh) -> Incident:
    times = [(3.0 if rank in seen.ranks else 1.0) * (50 + rank % 3 / 10) for rank in range(len(mesh))]
    layers, phases = RankStragglers(mesh, StragglerConfig()), PhaseStragglers(mesh, StragglerConfig())
    found: list[Incident] = []
    for step in range(40):
        if seen.what == "slow input":
            found = phases.observe(step, {Phase.INPUT: dict(enumerate(times))})
        else:
            ranks, work = np.arange(len(mesh))[np.newaxis], Work("time/module", "", ())
            found = layers.observe([PeerTimes(step, work, ranks, np.array([times]))])
        if found:
            return found[0]
    raise AssertionError("nothing was found")


def _stopped(seen: Seen, mesh: Mesh) -> Incident:
    """All ranks issue five operations, and wait in the last one, except for those that the row names."""
    assert seen.what in ("late", "stopped by a signal", "ended", "unreachable", "another operation")
    line = CommGroup("world", tuple(range(len(mesh))), "world")
    reports = {}
    for rank in range(len(mesh)):
        is_named = rank in seen.ranks
        issued = 4 if is_named and seen.what in ("late", "stopped by a signal", "ended") else 5
        kind = 8 if is_named and seen.what == "another operation" else 7
        prints = {number: kind if number == 5 else 7 for number in range(1, issued + 1)}
        recent = Window(
            [IssuedOp("world", number, each, number * each, str(each)) for number, each in prints.items()]
        )
        progress = Progress(
            rank=rank,
            step=40,
            operation=2,
            phase=Phase.FORWARD,
            issued={"world": issued},
            recent=recent,
            at_communication=issued == 5,
            silent_seconds=6.0,
        )
        report = RankReport(rank, progress=progress, groups=(line,), stack="File ...")
        if is_named and seen.what == "stopped by a signal":
            report = replace(report, process=Process.STOPPED)
        if is_named and seen.what == "ended":
            report = replace(report, process=Process.GONE, gone_seconds=1.0, how="unknown")
        if not (is_named and seen.what == "unreachable"):
            reports[rank] = report
    missing = {*range(len(mesh))} - reports.keys()
    (incident,) = diagnose(Round(reports, mesh, is_repeat=True, confirmed=missing)).incidents
    return incident
