"""What several hubs know of each other's findings, so that each is reported once.

What is written while rounds repeat is held by ``tests/scenarios/test_repeated_rounds.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torchscout.observer.rounds.rank_report import RankReport

from tests.support.incidents import incident_from
from torchscout.decision.consensus import exact
from torchscout.decision.progress import Process, RankStatus
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Resolved
from torchscout.observer.rounds.reported_incidents import Finding, ReportedIncidents

LATE = Finding("rank", "issued/world", 3, (2,), "rank 2 is late since 6 s", job_ended=False)


@pytest.mark.parametrize(
    "change", [{"ranks": (1, 2)}, {"scope": "machine"}, {"step": 4}, {"surface": "fingerprint/world"}]
)
def test_another_conclusion_is_new(change: dict[str, object]):
    reported = ReportedIncidents()
    assert [reported.enter(LATE), reported.enter(replace(LATE, sentence="again"))] == [True, False]
    assert reported.enter(replace(LATE, **change))
    assert reported.finding == replace(LATE, **change)


def test_an_incident_is_resolved_when_all_named_ranks_move():
    reported = ReportedIncidents()
    reported.enter(replace(LATE, ranks=(1, 2)))
    assert [reported.moved(*each) for each in ((0, 99.0), (2, 7.5), (2, 99.0))] == [None] * 3
    assert reported.moved(1, 7.0) == Resolved(
        step=3, ranks=(1, 2), sentence=LATE.sentence, stalled_seconds=7.5
    )


def test_a_finding_of_another_hub_is_not_new_and_can_be_resolved_here():
    reported = ReportedIncidents()
    reported.adopt(LATE)
    assert not reported.enter(replace(LATE, sentence="rank 2 is late since 16 s"))
    assert reported.moved(2, 7.5).sentence == LATE.sentence
    assert reported.finding is None


def test_a_hub_without_a_finding_learns_it_from_ranks_that_move():
    reported, both = ReportedIncidents(), replace(LATE, ranks=(1, 2))
    assert reported.moved(2, 7.5) is None
    assert reported.moved(2, 7.5, both) is None
    assert reported.finding is None, "only part of the ranks is known to move, and nothing stands here"
    assert reported.moved(2, 7.5, both) is None
    resolved = reported.moved(1, 7.0, both)
    assert resolved == Resolved(step=3, ranks=(1, 2), sentence=LATE.sentence, stalled_seconds=7.5)
    assert reported.moved(2, 7.5, replace(LATE, job_ended=True)) is None
    assert reported.enter(both), "the same again is news again"


def test_the_current_finding_takes_precedence_over_that_of_a_rank_that_moves():
    reported = ReportedIncidents()
    reported.enter(LATE)
    assert reported.moved(1, 7.5, replace(LATE, ranks=(1,))) is None
    assert reported.finding == LATE
    assert reported.moved(2, 7.5, replace(LATE, ranks=(1,))).ranks == (2,)


def test_a_finding_keeps_its_sentence_when_another_hub_repeats_it():
    reported = ReportedIncidents()
    reported.enter(LATE)
    reported.adopt(replace(LATE, sentence="rank 2 is late since 16 s"))
    assert reported.moved(2, 7.5).sentence == LATE.sentence


def test_another_hub_withdraws_only_its_own_finding():
    reported = ReportedIncidents()
    reported.adopt(LATE)
    reported.adopt(None)
    assert reported.finding is None
    reported.enter(LATE)
    reported.adopt(None)
    assert reported.finding == LATE


def incident_of(*ranks: int) -> Incident:
    record = EvidenceRecord(
        step=3, surface="issued/world", manifestation=Manifestation.HANG, peers=(1, 2), verdict=exact([5, 4])
    )
    return incident_from(record, ranks, sentence=f"Ranks {ranks} are late.")


def posted(*gone: int, has_timed_out: bool = True) -> dict[int, RankReport]:
    """Ranks 0 and 1 have waited for rank 2."""
    processes = [Process.GONE if rank in gone else Process.RUNNING for rank in range(3)]
    return {
        rank: RankReport(RankStatus(rank, process, None), (), has_timed_out=has_timed_out and rank < 2)
        for rank, process in enumerate(processes)
    }


def test_only_ranks_that_timed_out_after_an_incident_are_a_consequence():
    reported = ReportedIncidents()
    late = incident_of(0, 1)
    assert reported.traced(late, posted()) is late, "nobody was named before"
    reported.report(incident_of(2), posted())
    assert reported.traced(late, posted(has_timed_out=False)) is late
    again = incident_of(2)
    assert reported.traced(again, posted()) is again
    both = incident_of(1, 2)
    assert reported.traced(both, posted()) is both


@pytest.mark.parametrize(("process", "job_ended"), [(Process.RUNNING, False), (Process.GONE, True)])
def test_a_finding_summarizes_the_incident(process: Process, job_ended: bool):
    posts = {rank: RankReport(RankStatus(rank, process, None), ()) for rank in (1, 2)}
    incident = incident_of(2)
    finding = Finding.of(incident, posts if job_ended else {2: posts[2]})
    assert finding == replace(LATE, sentence=incident.sentence, job_ended=job_ended)
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
