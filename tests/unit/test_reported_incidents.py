"""What several hubs know of each other's findings, so that each is reported once.

What is written while rounds repeat is held by ``tests/scenarios/test_repeated_rounds.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.incidents import incident_from
from torchscout.decision.consensus import exact
from torchscout.decision.progress import How, Phase, Process, Progress, RankReport, Window
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Resolved
from torchscout.observer.rounds.reported_incidents import Finding, ReportedIncidents

LATE = Finding("7f", "rank", "issued/world", 3, (2,), "rank 2 is late since 6 s", job_ended=False)
LATER = replace(LATE, sentence="rank 2 is late since 16 s")
BOTH = replace(LATE, ranks=(1, 2))
DIFFERENT = replace(LATE, surface="fingerprint/world", ranks=(1, 2))


@pytest.mark.parametrize(
    ("first", "second", "is_new"),
    [
        (LATE, LATER, False),
        (LATE, BOTH, True),
        (LATE, replace(LATE, scope="machine"), True),
        (LATE, replace(LATE, step=4), True),
        (LATE, replace(LATE, surface="fingerprint/world"), True),
        # A majority may have come to those that differ, or they are not known to be the minority any more.
        (DIFFERENT, replace(DIFFERENT, ranks=(2,), scope="rank"), False),
        (replace(DIFFERENT, ranks=(2,)), replace(DIFFERENT, scope="process_group"), False),
        (DIFFERENT, replace(DIFFERENT, ranks=(3,)), True),
        (DIFFERENT, replace(DIFFERENT, surface="fingerprint/other"), True),
    ],
)
def test_what_names_the_same_is_no_news(first: Finding, second: Finding, is_new: bool):
    reported = ReportedIncidents()
    assert [reported.enter(first), reported.enter(second)] == [True, is_new]
    assert reported.findings == [first, second][: 1 + is_new]


def test_an_incident_is_resolved_when_all_named_ranks_move():
    reported = ReportedIncidents()
    reported.enter(BOTH)
    assert [reported.moved(*each) for each in ((0, 99.0), (2, 7.5), (2, 99.0))] == [[]] * 3
    assert reported.moved(1, 7.0) == [
        Resolved(incident="7f", step=3, ranks=(1, 2), sentence=LATE.sentence, stalled_seconds=7.5)
    ]
    assert reported.findings == []
    assert reported.enter(BOTH), "the same again is news again"


def test_each_of_two_findings_is_over_by_itself():
    reported, lost = ReportedIncidents(), replace(LATE, scope="machine", ranks=(0, 1))
    reported.enter(lost)
    reported.enter(LATE)
    assert [each.ranks for each in reported.moved(2, 7.5)] == [(2,)]
    assert reported.findings == [lost]
    assert reported.moved(0, 7.5) == []
    assert [each.ranks for each in reported.moved(1, 7.5)] == [(0, 1)]


@pytest.mark.parametrize(
    ("is_own", "adopted", "left"),
    [
        (True, [LATER], [LATE]),  # in the words in which it was written
        (True, [], [LATE]),
        (True, [BOTH], [LATE, BOTH]),
        (False, [LATE, BOTH], [LATE, BOTH]),
        (False, [], []),
    ],
)
def test_another_hub_adds_findings_and_withdraws_its_own(
    is_own: bool, adopted: Sequence[Finding], left: Sequence[Finding]
):
    reported = ReportedIncidents()
    if is_own:
        reported.enter(LATE)
    else:
        reported.adopt([LATE])
        assert not reported.enter(LATER)
    reported.adopt(adopted)
    assert reported.findings == left
    assert [each.sentence for each in reported.moved(2, 7.5)] == [
        each.sentence for each in left if each is LATE
    ]


def test_a_hub_without_a_finding_learns_it_from_ranks_that_move():
    reported = ReportedIncidents()
    assert reported.moved(2, 7.5) == []
    assert reported.moved(2, 7.5, [BOTH]) == []
    assert [each.ranks for each in reported.moved(1, 7.0, [BOTH])] == [(1, 2)]
    assert reported.moved(2, 7.5, [replace(LATE, job_ended=True)]) == [], "its peers are gone"


def test_what_is_known_here_takes_precedence_over_what_a_rank_says():
    reported = ReportedIncidents()
    reported.enter(LATE)
    assert reported.moved(1, 7.5, [replace(LATE, ranks=(1,))]) == []
    assert [each.ranks for each in reported.moved(2, 7.5, [replace(LATE, ranks=(1,))])] == [(2,)]


@pytest.mark.parametrize("how", ["killed", "failed", "asked"])
def test_trainers_that_end_while_the_job_stands_still_are_a_consequence(how: How):
    reported, crash = ReportedIncidents(), Manifestation.CRASH
    assert reported.report(incident_of(2), posted(has_timed_out=False))
    gone = {rank: replace(each, how=how) for rank, each in posted(0, 1, has_timed_out=False).items()}
    assert not any(reported.report(replace(incident_of(rank), manifestation=crash), gone) for rank in (0, 1))
    assert reported.moved(2, 7.5) == [], "the job has ended"


@pytest.mark.parametrize(
    ("step", "process", "is_over"),
    [(4, Process.RUNNING, True), (3, Process.RUNNING, False), (4, Process.GONE, False)],
)
def test_a_rank_that_went_on_may_leave_before_it_knows_that_it_was_named(
    step: int, process: Process, is_over: bool
):
    progress = Progress(2, step, 0, Phase.IDLE, {}, Window(), at_communication=False, silent_seconds=0.0)
    reported = ReportedIncidents()
    reported.enter(LATE)
    assert len(reported.left(RankReport(2, process, progress))) == is_over


@pytest.mark.parametrize(("step", "is_over"), [(5, False), (6, True)])
def test_a_trainer_that_went_on_and_ended_before_its_observer_said_so_is_reported(step: int, is_over: bool):
    reported = ReportedIncidents()
    host = Progress(2, 5, 1, Phase.FORWARD, {}, Window(), at_communication=False, silent_seconds=6.0)
    assert reported.report(incident_of(2), {2: RankReport(2, Process.RUNNING, host)})
    progress = replace(host, step=step, silent_seconds=0.1)
    ended = RankReport(2, Process.GONE, progress, gone_seconds=0.1, how="killed")
    assert len(reported.gone_on({2: ended})) == is_over
    crash = replace(LATE, surface="process", step=step, job_ended=True)
    assert reported.enter(crash) == is_over, "else a launcher ended it because the job stood still"


def incident_of(*ranks: int) -> Incident:
    record = EvidenceRecord(
        step=3, surface="issued/world", manifestation=Manifestation.HANG, peers=(1, 2), verdict=exact([5, 4])
    )
    return incident_from(record, ranks, sentence=f"Ranks {ranks} are late.")


def posted(*gone: int, has_timed_out: bool = True) -> dict[int, RankReport]:
    """Ranks 0 and 1 have waited for rank 2."""
    return {
        rank: RankReport(
            rank,
            Process.GONE if rank in gone else Process.RUNNING,
            has_timed_out=has_timed_out and rank < 2,
        )
        for rank in range(3)
    }


def test_ranks_that_timed_out_after_an_incident_are_a_consequence():
    reported, late, cause = ReportedIncidents(), incident_of(0, 1), incident_of(2)
    assert reported.traced(late, posted()) is late, "nobody was named before"
    reported.report(cause, posted())
    assert reported.traced(late, posted()) is None, "it adds nothing while they still wait"
    traced = reported.traced(late, posted(0, 1))
    assert traced is not None
    assert traced.ranks == (2,)
    assert traced.sentence.endswith("The trainers of ranks 0 and 1 ended after waiting for too long.")
    for other, reports in (
        (late, posted(has_timed_out=False)),
        (incident_of(2), posted()),
        (incident_of(1, 2), posted()),
    ):
        assert reported.traced(other, reports) is other


@pytest.mark.parametrize("gone", [(), (1,)])
def test_a_finding_summarizes_the_incident(gone: tuple[int, ...]):
    incident = incident_of(2)
    finding = Finding.of(incident, posted(*gone))
    assert finding == replace(LATE, id=incident.id, sentence=incident.sentence, job_ended=bool(gone))
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding


@pytest.mark.parametrize(
    "wrong", [{"ranks": "01"}, {"step": None}, {"job_ended": 1}, {"sentence": []}, {"ranks": [[0]]}], ids=str
)
def test_a_finding_of_wrong_types_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match="not a finding"):
        Finding.from_json({**LATE.to_json(), **wrong})
