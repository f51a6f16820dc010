"""Hubs report each finding once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.incidents import incident_from
from torchscout.decision.consensus.rules import exact
from torchscout.decision.progress import Process, RankStatus
from torchscout.decision.records.record import EvidenceRecord, Incident, Manifestation, Resolved
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.rounds.reported_incidents import Finding, ReportedIncidents

LATE = Finding("rank", "issued/world", 3, (2,), "rank 2 is late since 6 s", job_ended=False)


def test_the_same_conclusion_is_new_once():
    reported = ReportedIncidents()
    assert reported.enter(LATE)
    assert not reported.enter(replace(LATE, sentence="rank 2 is late since 16 s"))
    assert reported.finding == LATE


@pytest.mark.parametrize(
    "change", [{"ranks": (1, 2)}, {"scope": "machine"}, {"step": 4}, {"surface": "fingerprint/world"}]
)
def test_another_conclusion_is_new(change: dict[str, object]):
    reported = ReportedIncidents()
    reported.enter(LATE)
    assert reported.enter(replace(LATE, **change))
    assert reported.finding == replace(LATE, **change)


def test_a_trainer_that_ends_after_the_job_has_stopped_is_not_new():
    reported = ReportedIncidents()
    reported.enter(LATE)
    assert not reported.enter(replace(LATE, ranks=(0,), job_ended=True))
    assert reported.finding == LATE


def test_after_a_death_nothing_is_new():
    reported = ReportedIncidents()
    assert reported.enter(replace(LATE, ranks=(1,), job_ended=True))
    assert not reported.enter(LATE)


def test_an_incident_is_resolved_when_all_named_ranks_move():
    reported = ReportedIncidents()
    reported.enter(replace(LATE, ranks=(1, 2)))
    assert reported.moved(0, 99.0) is None
    assert reported.moved(2, 7.5) is None
    assert reported.moved(2, 99.0) is None  # reported before
    assert reported.moved(1, 7.0) == Resolved(
        step=3, ranks=(1, 2), sentence=LATE.sentence, stalled_seconds=7.5
    )
    assert reported.finding is None
    assert reported.enter(LATE), "the same again is news again"


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


def test_a_rank_that_moves_after_others_have_ended_resolves_nothing():
    """It finds them missing, and they must not be reported as if they were the cause."""
    reported = ReportedIncidents()
    assert reported.enter(LATE)
    assert not reported.enter(replace(LATE, ranks=(0,), job_ended=True))
    assert reported.moved(2, 7.0) is None
    assert not reported.enter(replace(LATE, ranks=(0, 1), job_ended=True))


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


def test_ranks_that_timed_out_are_a_consequence_of_the_earlier_incident():
    reported = ReportedIncidents()
    assert reported.report(incident_of(2), posted())
    reported.moved(2, 7.0)
    assert reported.traced(incident_of(0, 1), posted()) is None
    traced = reported.traced(incident_of(0, 1), posted(0, 1))
    assert traced.ranks == (2,)
    assert traced.sentence.endswith("The trainers of ranks 0 and 1 ended after waiting for too long.")
    assert reported.report(traced, posted(0, 1))
    assert not reported.report(reported.traced(incident_of(0), posted(0, 1)), posted(0, 1)), "once"


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
    record = EvidenceRecord(
        step=3, surface="issued/world", manifestation=Manifestation.HANG, peers=(1, 2), verdict=exact([5, 4])
    )
    incident = incident_from(record, (2,), sentence=LATE.sentence)
    posts = {
        1: RankReport(RankStatus(1, Process.GONE, None), ()),
        2: RankReport(RankStatus(2, process, None), ()),
    }
    finding = Finding.of(incident, posts if job_ended else {2: posts[2]})
    assert finding == replace(LATE, job_ended=job_ended)
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
