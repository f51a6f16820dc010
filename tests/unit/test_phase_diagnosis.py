"""Slow phases: what an incident says, which of two hubs are the same one, and which settings apply."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from torchscout.observer.rounds.rank_report import RankReport

from torchscout import attach
from torchscout.config import ObserverConfig, ReplayConfig, StragglerConfig
from torchscout.decision.progress import Phase, Process, RankStatus
from torchscout.decision.straggler.diagnosis import PhaseDiagnosis, is_known
from torchscout.decision.types import Incident
from torchscout.errors import ScoutError
from torchscout.mesh import Mesh
from torchscout.observer.process import ObserverProcess
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.spec import ObserverSpec, describe_mesh

HOSTS = ["node-0", "node-0", "node-1", "node-1"]


def slow_from(step: int, phase: Phase = Phase.INPUT, slow: int = 3, mesh: Mesh | None = None) -> Incident:
    """What a hub reports whose surveys were at this step and four steps later."""
    found = PhaseDiagnosis(mesh or Mesh.grid(replica=4, hosts=HOSTS), StragglerConfig(min_slowdown_ms=10.0))
    times = {rank: 410.0 if rank == slow else 18.0 for rank in range(4)}
    assert found.observe(step, {phase: times}) == []
    (incident,) = found.observe(step + 4, {phase: times})
    assert found.observe(step + 8, {phase: times}) == []
    return incident


def test_an_incident_says_who_is_slow_where_and_by_how_much():
    incident = slow_from(5)
    assert (incident.step, incident.ranks, incident.hosts) == (9, (3,), ("node-1",))
    assert incident.records[0].surface == "time/input"
    assert all(fact in incident.sentence for fact in ("Rank 3", "node-1", "410 ms", "18 ms", "step 5"))


def test_what_two_hubs_find_is_one_incident_until_the_rank_was_fast():
    known = slow_from(5)
    assert [is_known(slow_from(step), known) for step in (3, 7, 9, 10)] == [True, True, True, False]
    assert not is_known(slow_from(7, Phase.CHECKPOINT_WRITE), known)
    assert not is_known(slow_from(7, slow=2), known)


def test_replicas_with_different_experts_still_fetch_alike():
    assert slow_from(5, mesh=Mesh.grid(replica=4).carve_experts(4)).ranks == (3,)


def test_the_settings_for_stragglers_apply_to_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patient, start = StragglerConfig(confirmations=4), Mock(side_effect=ScoutError)
    monkeypatch.setattr(attach, "start_monitor", start)
    attach._monitor(
        Mock(), ObserverConfig(), ReplayConfig(straggler=patient), Mock(plan_folders=()), ExitStack()
    )
    assert start.call_args.kwargs["straggler"] == patient
    statuses = [RankStatus(rank, Process.RUNNING, None) for rank in range(4)]
    times = (0.02, 0.02, 0.02, 0.4)
    reports = {
        each.rank: RankReport(each, (), phase_seconds={Phase.INPUT: times[each.rank]}) for each in statuses
    }
    writer = ProgressWriter.create(tmp_path, 0)
    spec = ObserverSpec(
        rank=0,
        size=4,
        record=str(writer.path),
        run_dir=str(tmp_path),
        token="t" * 16,
        config=ObserverConfig(),
        mesh=describe_mesh(Mesh.grid(replica=4)),
        straggler=patient,
    )
    observing = ObserverProcess(spec)
    assert [len(observing._compare(reports)) for _ in range(4)] == [0, 0, 0, 1]
    observing._close()
    writer.close()
