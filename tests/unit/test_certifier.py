"""What a check is worth, what a promoted generation had, and the certified step of a job without checkpoints:
details of ``scenarios/test_gate``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.checkpoint.gate import Changed, Checked, CheckpointGate, Generation, Outcome, transition
from torchscout.config import CheckpointConfig
from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import NONDETERMINISTIC
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.errors import CheckpointError
from torchscout.session.checkpoints.certifier import (
    SEVERITY,
    CertifiedSteps,
    CheckCoverage,
    CheckVote,
    PromotionRule,
    events_of,
    outcome_of,
)
from torchscout.session.replay.coverage import RecipeCycle

HEALTHY = Outcome.HEALTHY
FINE = CheckVote(HEALTHY, 0)


def number(layer: str, reason: str | None = None) -> EvidenceRecord:
    return EvidenceRecord(
        step=1,
        surface=f"{layer}/output",
        manifestation=Manifestation.SDC,
        peers=(0, 1, 2),
        verdict=None if reason else exact([1, 1, 1]),
        reason=reason,
        layer=layer or None,
    )


@pytest.mark.parametrize(
    ("require", "outcome"),
    [
        ((), Outcome.HEALTHY),
        (("backward",), Outcome.HEALTHY),
        (("forward",), Outcome.NOT_CHECKED),
        (("layer.*/output",), Outcome.NOT_CHECKED),
        (("layer.1/*", "*/grad_input"), Outcome.HEALTHY),
    ],
)
def test_a_nondeterministic_surface_prevents_certification_only_where_it_is_required(
    require: tuple[str, ...], outcome: Outcome
):
    left_out = replace(number("layer.0", f"{NONDETERMINISTIC}: atomics"), mode="forward x0.1")
    records = [number(""), number("layer.0"), left_out]
    assert outcome_of(records, [], ("", "layer.0"), require) is outcome


def counted(*ballots: CheckVote) -> CheckVote:
    votes = [each.votes() for each in ballots]
    return CheckVote.counted([max(column) for column in zip(*votes, strict=True)])


def test_the_outcome_of_the_job_is_the_worst_of_any_rank():
    assert {*SEVERITY} == {*Outcome}
    for place, worst in enumerate(SEVERITY):
        for other in SEVERITY[: place + 1]:
            assert counted(CheckVote(other, 0), CheckVote(worst, 0), CheckVote(other, 0)).outcome is worst


def test_ranks_in_different_cycles_are_an_error():
    with pytest.raises(CheckpointError, match=r"accepted 1 .* 2"):
        counted(CheckVote(HEALTHY, 1), CheckVote(HEALTHY, 2))
    assert counted(CheckVote(HEALTHY, 2), CheckVote(HEALTHY, 2)).accepted_recipes == 2


def test_what_one_rank_reports_counts_for_all():
    gate, _ = transition(CheckpointGate(), Checked(5, HEALTHY))
    own = Generation(5)
    for votes, expected in (
        ([replace(FINE, unwritten=True), replace(FINE, writing=True)], ["sealed", "write_failed"]),
        ([FINE, replace(FINE, writing=True)], ["sealed"]),
        ([FINE, FINE], ["sealed", "written"]),
        ([replace(FINE, lost=True), replace(FINE, unwritten=True)], ["lost", "write_failed"]),
    ):
        reports = [Changed(kind, own) for kind in expected]
        assert events_of(gate, 6, counted(*votes)) == [*reports, Checked(6, HEALTHY)]
    one_is_unready = counted(FINE, replace(FINE, unready=True))
    assert events_of(CheckpointGate(), 6, one_is_unready) == [Checked(6, HEALTHY, can_capture=False)]


def test_with_a_catalog_full_coverage_counts_paths_and_state_coverage_counts_comparisons_of_state():
    full, state, dense = PromotionRule("full", 42), PromotionRule("state", 42), PromotionRule("full", None)
    assert (full.recipes, state.recipes, dense.recipes) == (42, None, None)
    assert [full.worth(CheckCoverage(paths)) for paths in (0, 1, 8)] == [0, 1, 8]
    assert [state.worth(CheckCoverage(3, has_state)) for has_state in (False, True)] == [0, 1]
    assert dense.worth(CheckCoverage(state=False)) == 1


def test_state_coverage_says_how_many_paths_a_promoted_generation_had():
    rule = PromotionRule("state", 5)
    logged, before = [], []
    outcomes = (Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.HEALTHY, Outcome.HEALTHY)
    for step, outcome in enumerate(outcomes, start=1):
        rule.checked(outcome, CheckCoverage(paths=3))
        if outcome.accepted:
            rule.captured(Generation(step))
            logged.append(rule.promoted(Generation(step)))
            before.append((rule.promotion or {})["before"])
    assert before == [3, 5, 3, 5], "in a row, and no more than there are"
    assert logged[0] is not None
    assert logged[1:] == [None] * 3, "such promotions are too many for the log"


def test_full_coverage_is_logged_with_every_cycle():
    rule = PromotionRule("full", 5)
    for step in (5, 10):
        rule.checked(HEALTHY, CheckCoverage(paths=1, state=step == 5))
        rule.captured(Generation(step))
        sentence = rule.promoted(Generation(step))
        assert sentence is not None
    facts = {"step": 10, "coverage": "full", "paths": 5, "state": False, "before": 5, "after": 5}
    assert rule.promotion == {**facts, "sentence": sentence}


def test_another_name_of_coverage_is_refused():
    with pytest.raises(ValueError, match="full, state, got 'paths'"):
        CheckpointConfig("checkpoints", coverage="paths")


def certified_after(*outcomes: Outcome, recipes: int | None = None, idle: tuple[int, ...] = ()) -> int | None:
    """Checks at steps 10, 20 and so on, of which the ``idle`` ones go over nothing that counts."""
    certifier = CertifiedSteps()
    certifier.set_coverage(RecipeCycle(recipes))
    for place, outcome in enumerate(outcomes, start=1):
        check = CheckCoverage(paths=int(place not in idle))
        certifier.decide(10 * place, certifier.votes(outcome, differs=False), check)
    return certifier.certified_step


def test_the_certified_step_of_a_job_without_checkpoints():
    assert certified_after() is None
    assert certified_after(HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED) == 20
    assert certified_after(HEALTHY, Outcome.REJECTED, HEALTHY) == 30
    assert certified_after(HEALTHY, Outcome.SDC, HEALTHY, HEALTHY) == 10
    assert certified_after(*[HEALTHY] * 5, recipes=3) is None
    assert certified_after(*[HEALTHY] * 6, recipes=3) == 30
    assert certified_after(*[HEALTHY] * 9, recipes=3) == 60
    assert certified_after(*[HEALTHY] * 6, recipes=3, idle=(2,)) is None
    assert certified_after(*[HEALTHY] * 6, Outcome.SDC, HEALTHY, recipes=1, idle=(7,)) == 50


def test_what_may_have_changed_before_it_was_written_is_certified_no_more():
    certifier = CertifiedSteps()
    for step in (10, 20):
        certifier.decide(step, certifier.votes(HEALTHY, differs=False), CheckCoverage())
    certifier.decide(21, certifier.votes(Outcome.SDC, differs=True), CheckCoverage())
    assert certifier.certified_step == 10
