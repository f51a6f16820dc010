"""From gathered signatures to records: who is named, and what is not checked for which reason."""

from __future__ import annotations

from tests.support.incidents import incident_from
from torchscout.decision.consensus.rules import Status
from torchscout.decision.records.record import (
    Action,
    EvidenceRecord,
    Incident,
    Scope,
)
from torchscout.decision.sdc import OpenIncidents
from torchscout.replay.recipe import ABSENT, POISON, Comparison, Mode
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


def test_each_surface_is_judged_by_itself():
    found = judged([1, 1, 1, 1], [5, 5, 9, 5], [3, 3, 3, 3])
    assert found["layer.1/output"].ranks == (4,)
    assert [found[f"layer.1/{each}"].status for each in ("input", "grad_input")] == ["agree", "agree"]
    assert (found["layer.1/output"].layer, found["layer.1/output"].mode) == ("layer.1", "forward")


def test_an_input_that_differs_explains_whatever_follows():
    found = judged([1, 1, 8, 1], [5, 5, 9, 5], [3, 3, 4, 3])
    assert found["layer.1/input"].ranks == (4,)
    assert found["layer.1/output"].status == "not_checked"
    assert found["layer.1/output"].reason == "layer.1/input differs among peers already"


def test_nothing_to_compare_anywhere_is_not_checked_and_here_alone_is_a_difference():
    found = judged([1, 1, 1, 1], [5, 5, 5, 5], [ABSENT] * 4)
    assert found["layer.1/grad_input"].reason == "no gradient"
    found = judged([1, 1, 1, 1], [5, 5, 5, 5], [3, 3, ABSENT, 3])
    assert found["layer.1/grad_input"].ranks == (4,)


def test_a_rank_that_failed_is_no_evidence_and_the_others_still_vote():
    found = judged([1, 1, 1, 1], [5, 5, POISON, 9], [3, 3, POISON, 3], problem="RuntimeError: no memory")
    assert found["layer.1/output"].peers == (0, 2, 6)
    assert found["layer.1/output"].ranks == (6,)
    assert found["layer.1/grad_input"].verdict.status is Status.AGREE
    failed = found["layer.1/output failed"]
    assert failed.reason == "replay failed on rank 4: RuntimeError: no memory"


def test_a_single_remaining_rank_is_not_compared():
    found = judged([1, POISON, POISON, POISON], [5] + [POISON] * 3, [3] + [POISON] * 3)
    assert {record.status for record in found.values()} == {"not_checked"}


def test_two_against_two_is_inconclusive():
    found = judged([1] * 4, [5, 5, 9, 9], [3] * 4)
    assert found["layer.1/output"].scope is Scope.PEER_GROUP
    assert found["layer.1/output"].ranks == ()


def test_variants_are_distinguished_by_their_mode():
    found = judged([1] * 4, [5] * 4, [3] * 4, variant=0.1)
    assert found["layer.1/output"].mode == "forward x0.1"


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


def incident(records: dict[str, EvidenceRecord], surface: str) -> Incident:
    return incident_from(records[surface], records[surface].ranks, action=Action.REPLACE, sentence="")


def test_an_incident_is_new_once_until_it_has_ended():
    ongoing = OpenIncidents()
    wrong, right = judged([1] * 4, [5, 5, 9, 5], [3] * 4), judged([1] * 4, [5] * 4, [3] * 4)
    elsewhere = judged([1] * 4, [5] * 4, [3] * 4, comparisons=[Comparison(f"x/{n}", "other") for n in "abc"])
    found = incident(wrong, "layer.1/output")

    def news(incidents: list[Incident], records: dict[str, EvidenceRecord]) -> list[Incident]:
        return ongoing.new_ones(incidents, list(records.values()))

    assert news([found], wrong) == [found]
    assert news([found], wrong) == []
    assert news([], elsewhere) == [], "something else was compared: that says nothing"
    assert news([found], wrong) == []
    assert news([], right) == []
    assert news([found], wrong) == [found], "it ended, and has come back"


def test_an_incident_of_another_rank_is_new():
    ongoing = OpenIncidents()
    first, second = judged([1] * 4, [5, 5, 9, 5], [3] * 4), judged([1] * 4, [5, 5, 9, 8], [3] * 4)
    assert len(ongoing.new_ones([incident(first, "layer.1/output")], list(first.values()))) == 1
    assert len(ongoing.new_ones([incident(second, "layer.1/output")], list(second.values()))) == 1


def test_whoever_differs_from_what_is_known_to_be_right_is_named_whatever_others_have():
    at_rest = [Comparison("state/owned", Mode.STATE, expected=1)]
    assert judged([1, 1, 1, 1], comparisons=at_rest)["state/owned"].scope is None
    found = judged([5, 1, 5, 5], comparisons=at_rest)["state/owned"]
    assert (found.scope, found.ranks) == (Scope.RANK, (0, 4, 6))
    found = judged([5, POISON, POISON, 1], comparisons=at_rest)["state/owned"]
    assert (found.scope, found.ranks, found.peers) == (Scope.RANK, (0,), (0, 6))
