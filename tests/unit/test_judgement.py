"""From gathered signatures to records: who is named, and what is not checked for which reason."""

from __future__ import annotations

from torchscout.decision.types import (
    EvidenceRecord,
    Scope,
)
from torchscout.replay.recipe import POISON, Comparison, Mode
from torchscout.replay.verdicts import Context, broken_depth, judge, withhold

PEERS = (0, 2, 4, 6)
LAYER = [
    Comparison("layer.1/input", Mode.INPUT),
    Comparison("layer.1/output", Mode.FORWARD, ("layer.1/input",)),
    Comparison("layer.1/grad_input", Mode.BACKWARD, ("layer.1/input",), absent="no gradient"),
]


def judged(
    *columns: list[int], comparisons: list[Comparison] = LAYER, **context
) -> dict[str, EvidenceRecord]:
    gathered = {each.surface: column for each, column in zip(comparisons, columns, strict=True)}
    records = judge(Context(7, PEERS, "layer.1", **context), comparisons, gathered)
    return {f"{each.surface} failed" if is_failure(each) else each.surface: each for each in records}


def is_failure(record: EvidenceRecord) -> bool:
    return record.reason is not None and record.reason.startswith("replay failed")


def test_what_agrees_under_one_summary_is_one_record_and_what_differs_its_own():
    census = [Comparison(name, Mode.STATE, summary="state/parameters") for name in ("a/w", "b/w", "c/w")]
    found = judged([1] * 4, [5, 5, 9, 5], [3] * 4, comparisons=census)
    assert found.keys() == {"state/parameters", "b/w"}
    assert found["b/w"].ranks == (4,)
    assert found["state/parameters"].verdict.agrees
    other = judged([2] * 4, [5, 5, 9, 5], [3] * 4, comparisons=census)
    assert other["state/parameters"].verdict.evidence != found["state/parameters"].verdict.evidence


CHAIN = [
    Comparison("layer.1/parameters", Mode.STATE, tie="another comparison says so"),
    Comparison("layer.1/weight.grad", Mode.BACKWARD, ("layer.1/parameters",)),
    Comparison("layer.1/grad_scattered", Mode.BACKWARD, ("layer.1/weight.grad",)),
]
SAME = [1, 1, 1, 1]


def test_a_tie_that_is_anothers_to_report_is_not_checked_and_still_explains_what_follows():
    found = judged([1, 1, 2, 2], [3, 3, 4, 4], SAME, comparisons=CHAIN)
    assert found["layer.1/parameters"].reason == "another comparison says so"
    assert found["layer.1/weight.grad"].reason == "layer.1/parameters differs among peers already"
    assert broken_depth(CHAIN, [*found.values()]) == 0
    # A majority is no tie.
    assert judged([1, 1, 1, 2], SAME, SAME, comparisons=CHAIN)["layer.1/parameters"].ranks == (6,)


def test_how_deep_a_difference_lies_says_what_else_is_in_doubt():
    gradient = judged(SAME, [3, 3, 3, 4], SAME, comparisons=CHAIN)
    assert broken_depth(CHAIN, [*gradient.values()]) == 1
    assert broken_depth(CHAIN, [*judged(SAME, SAME, SAME, comparisons=CHAIN).values()]) is None
    # Nothing builds upon the last.
    last = judged(SAME, SAME, [3, 3, 3, 4], comparisons=CHAIN)
    assert broken_depth(CHAIN, [*last.values()]) is None
    # Another rank's gradient differs: what was made of all ranks' is nobody's fault here.
    assert [each.ranks for each in withhold(CHAIN, [*last.values()], 1)] == [(), (), ()]
    assert [each.ranks for each in withhold(CHAIN, [*last.values()], 2)] == [(), (), (6,)]
    assert [each.ranks for each in withhold(CHAIN, [*gradient.values()], 1)] == [(), (6,), ()]


def test_whoever_differs_from_what_is_known_to_be_right_is_named_whatever_others_have():
    at_rest = [Comparison("state/owned", Mode.STATE, expected=1)]
    assert judged([1, 1, 1, 1], comparisons=at_rest)["state/owned"].scope is None
    found = judged([5, 1, 5, 5], comparisons=at_rest)["state/owned"]
    assert (found.scope, found.ranks) == (Scope.RANK, (0, 4, 6))
    found = judged([5, POISON, POISON, 1], comparisons=at_rest)["state/owned"]
    assert (found.scope, found.ranks, found.peers) == (Scope.RANK, (0,), (0, 6))
