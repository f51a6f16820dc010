"""What a promotion to verified needs, and what a promoted generation had."""

from __future__ import annotations

import pytest

from torchscout.checkpoint.trust.gate_state import Outcome
from torchscout.checkpoint.trust.generation import Generation
from torchscout.config import CheckpointConfig
from torchscout.session.checkpoints.promotion import CheckCoverage, PromotionRule


def test_with_a_catalog_full_coverage_counts_paths_and_state_coverage_counts_comparisons_of_state():
    full, state = PromotionRule("full", 42), PromotionRule("state", 42)
    assert (full.recipes, state.recipes) == (42, None)
    assert [full.worth(CheckCoverage(paths)) for paths in (0, 1, 8)] == [0, 1, 8]
    assert [state.worth(CheckCoverage(3, has_state)) for has_state in (False, True)] == [0, 1]


@pytest.mark.parametrize("coverage", ["full", "state"])
def test_without_a_catalog_every_check_counts_once(coverage: str):
    rule = PromotionRule(coverage, None)
    assert (rule.recipes, rule.worth(CheckCoverage(state=False))) == (None, 1)
    rule.checked(Outcome.HEALTHY, CheckCoverage())
    rule.captured(Generation(20))
    assert rule.promoted(Generation(20)) is None, "such promotions are too many for the log"
    assert rule.last is not None
    assert "20" in rule.last.sentence()


def test_state_coverage_says_how_many_paths_a_promoted_generation_had():
    rule = PromotionRule("state", 5)
    logged, before = [], []
    outcomes = (Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.HEALTHY, Outcome.HEALTHY)
    for step, outcome in enumerate(outcomes, start=1):
        rule.checked(outcome, CheckCoverage(paths=3))
        if outcome.accepted:
            rule.captured(Generation(step))
            logged.append(rule.promoted(Generation(step)))
            assert rule.last is not None
            before.append(rule.last.before)
    assert before == [3, 5, 3, 5], "in a row, and no more than there are"
    first, *others = logged
    assert others == [None] * 3
    for number in ("tep 1 ", "5 paths", "3 were accepted before", "0 after"):
        assert number in str(first)


def test_full_coverage_is_logged_with_every_cycle():
    rule = PromotionRule("full", 5)
    for step in (5, 10):
        rule.checked(Outcome.HEALTHY, CheckCoverage(paths=1, state=step == 5))
        rule.captured(Generation(step))
        sentence = rule.promoted(Generation(step))
        assert sentence is not None
        for number in (f"tep {step} ", "5 were accepted before", "5 after"):
            assert number in sentence
    assert rule.last is not None
    facts = {"step": 10, "coverage": "full", "paths": 5, "state": False, "before": 5, "after": 5}
    assert rule.last.to_json() == {**facts, "sentence": rule.last.sentence()}


def test_another_name_of_coverage_is_refused():
    with pytest.raises(ValueError, match="full, state, got 'paths'"):
        CheckpointConfig("checkpoints", coverage="paths")
