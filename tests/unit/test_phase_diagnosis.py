"""Surveys of input and checkpoint times: who is named, who is not, and how often."""

from __future__ import annotations

import pytest

from torchscout.config import StragglerConfig
from torchscout.decision.consensus.rules import Status
from torchscout.decision.progress import Phase, Process, RankStatus
from torchscout.decision.records.record import Action, Incident, Manifestation, Scope
from torchscout.decision.straggler.diagnosis import PhaseDiagnosis, is_known
from torchscout.mesh import Mesh
from torchscout.observer.rounds.diagnosis import compare_phases
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reports import Reports

HOSTS = ["node-0", "node-0", "node-1", "node-1"]
CONFIG = StragglerConfig(min_slowdown_ms=10.0)


def diagnosis(size: int = 4) -> PhaseDiagnosis:
    return PhaseDiagnosis(Mesh.grid(replica=size, hosts=HOSTS[:size]), CONFIG)


def survey(found: PhaseDiagnosis, step: int, *times: float, phase: Phase = Phase.INPUT) -> list[Incident]:
    return found.observe(step, {phase: dict(enumerate(times))})


def test_a_rank_slow_in_two_surveys_is_named_once():
    found = diagnosis()
    assert survey(found, 5, 18, 17, 18, 410) == []
    (incident,) = survey(found, 9, 18, 17, 19, 412)
    assert (incident.manifestation, incident.scope) == (Manifestation.STRAGGLER, Scope.RANK)
    assert (incident.ranks, incident.hosts, incident.action) == ((3,), ("node-1",), Action.INSPECT)
    assert incident.records[0].surface == "time/input"
    assert incident.sentence == (
        "Rank 3 on node-1 takes 412 ms to fetch a batch where its peers take 18 ms; "
        "slow in 2 surveys since step 5."
    )
    assert survey(found, 20, 18, 17, 19, 412) == []


def slow_from(step: int, phase: Phase = Phase.INPUT, slow: int = 3) -> Incident:
    """What a hub reports whose surveys were at this step and four steps later."""
    found, times = diagnosis(), [410.0 if rank == slow else 18.0 for rank in range(4)]
    survey(found, step, *times, phase=phase)
    (incident,) = survey(found, step + 4, *times, phase=phase)
    return incident


def test_what_two_hubs_find_is_one_incident_until_the_rank_was_fast():
    known = slow_from(5)
    assert known.step == 9
    assert [is_known(slow_from(step), known) for step in (3, 7, 9, 10)] == [True, True, True, False]
    assert not is_known(slow_from(7, Phase.CHECKPOINT_WRITE), known)
    assert not is_known(slow_from(7, slow=2), known)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.CHECKPOINT_READ, "takes 900 ms to read a checkpoint"),
        (Phase.CHECKPOINT_WRITE, "takes 900 ms to write a checkpoint"),
    ],
)
def test_checkpoints_are_compared_too(phase: Phase, words: str):
    found = diagnosis()
    survey(found, 5, 0.1, 0.1, 0.1, 900, phase=phase)
    (incident,) = survey(found, 9, 0.1, 0.2, 0.1, 900, phase=phase)
    assert incident.records[0].surface == f"time/{phase.value}"
    assert words in incident.sentence
    assert "its peers take less than 1 ms" in incident.sentence


@pytest.mark.parametrize(
    "times",
    [
        pytest.param((400, 410, 405, 398), id="all slow alike"),
        pytest.param((400, 410, 405, 1), id="one fast"),
        pytest.param((1.0, 1.1, 1.0, 9.0), id="too little to matter"),
    ],
)
def test_who_is_not_slow_is_not_named(times: tuple[float, ...]):
    found = diagnosis()
    assert [survey(found, step, *times) for step in range(5)] == [[]] * 5


def test_slow_in_one_survey_and_back_in_the_next_is_chance():
    found = diagnosis()
    for step in range(6):
        assert survey(found, step, 18, 17, 18, 410 if step % 2 else 18) == []


def test_of_two_peers_neither_is_named():
    found = diagnosis(2)
    survey(found, 5, 18, 412)
    (incident,) = survey(found, 9, 18, 412)
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))
    assert incident.records[0].verdict.status is Status.INCONCLUSIVE
    assert incident.sentence.startswith(
        "Ranks 0 and 1 on node-0 differ: rank 1 takes 412 ms to fetch a batch where its peer takes 18 ms"
    )


def test_one_rank_alone_has_no_peers():
    found = diagnosis(1)
    assert [survey(found, step, 412) for step in range(3)] == [[]] * 3


def test_a_minority_that_timed_the_phase_is_not_compared():
    found = diagnosis()
    for step in range(4):
        assert found.observe(step, {Phase.CHECKPOINT_WRITE: {0: 18, 1: 412}}) == []


def test_only_ranks_that_do_the_same_work_are_compared():
    found = PhaseDiagnosis(Mesh.grid(replica=3, tensor=2), CONFIG)
    for step in range(4):  # the second tensor-parallel rank of each replica waits for the first one's batch
        assert survey(found, step, 1, 400, 1, 401, 1, 400) == []


def test_replicas_with_different_experts_still_fetch_alike():
    found = PhaseDiagnosis(Mesh.grid(replica=4).carve_experts(4), CONFIG)
    survey(found, 5, 18, 17, 18, 410)
    assert [incident.ranks for incident in survey(found, 9, 18, 17, 18, 410)] == [(3,)]


def test_a_survey_is_made_of_posts():
    def reports() -> Reports:
        sent = [
            RankReport(RankStatus(rank, Process.RUNNING, None), (), phase_seconds={Phase.INPUT: seconds})
            for rank, seconds in enumerate([0.018, 0.017, 0.018, 0.41])
        ]
        return Reports.of({report.status.rank: report for report in sent})

    found = diagnosis()
    assert compare_phases(reports(), found) == []
    (incident,) = compare_phases(reports(), found)
    assert incident.records[0].verdict.evidence == (18.0, 17.0, 18.0, 410.0)
