"""The simulator: its layouts, how faults spread, what it draws, and that a wrong name is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from evaluation.__main__ import app
from evaluation.simulate import hangs, runner
from evaluation.simulate.job import NOTHING, Job
from evaluation.simulate.layouts import PUBLISHED, drawn, layout_of
from evaluation.simulate.reports import Reporter
from evaluation.simulate.scoring import Outcome, Truth, score
from evaluation.simulate.spread import Faults, spread
from tests.support.incidents import incident_from
from torchscout.decision.hang import Diagnosis
from torchscout.decision.progress import Process, RankReport
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope

SMALL = layout_of("4x4x8")


def test_published_layouts_have_their_ranks():
    assert {name: layout.ranks for name, layout in PUBLISHED.items()} == {
        "llama3-405b": 16_384,
        "megascale": 12_288,
        "megatron-1t": 3_072,
        "megascale-moe": 1_440,
        "deepseek-v3": 2_048,
    }
    assert layout_of("llama3-405b", 131_072).degrees == "TP8 PP16 DP1024"


@pytest.mark.parametrize(
    ("text", "ranks", "reason"),
    [
        ("8x16", None, "unknown layout '8x16'"),
        ("8x16xmany", None, "unknown layout"),
        ("0x1x1", None, "at least 1"),
        ("2x2x6x4", None, "4 expert-parallel ranks do not divide 6"),
        ("8x16x128", 100, "100 ranks are not a multiple of 128"),
    ],
)
def test_other_layouts_are_refused(text: str, ranks: int | None, reason: str):
    with pytest.raises(ValueError, match=reason):
        layout_of(text, ranks)


def test_small_jobs_have_small_groups_and_machines():
    layouts = [drawn(np.random.default_rng(seed)) for seed in range(200)]
    assert {2, 3} <= {each.data for each in layouts} & {each.tensor for each in layouts}
    assert {each.per_host for each in layouts} == {1, 2, 4, 8}
    assert all(2 <= each.ranks <= 36 for each in layouts)


@pytest.mark.parametrize("name", ["4x4x8", "1x4x8x4", "8x1x4"])
def test_a_stopped_rank_stops_all_and_waits_for_nobody(name: str):
    job = Job(layout_of(name))
    for rank in range(0, job.size, 1 + job.size // 6):
        for tick in np.flatnonzero(job.tick_lines[:, rank] != NOTHING).tolist()[::5]:
            standing = spread(job, Faults(stops={rank: tick}))
            assert (standing.tick < 2 * len(job.ticks)).all(), "every rank has stopped"
            assert np.flatnonzero(~standing.inside).tolist() == [rank]
            assert standing.waited_for[rank]


def test_members_of_a_group_have_the_same_operations():
    job, issued = Job(SMALL), dict[tuple[str, int], set[int]]()
    for rank in range(job.size):
        report = Reporter(job).report(rank, 42 * len(job.ticks))
        assert report.progress is not None
        window = report.progress.recent
        assert window.last_numbers == {each.group: each.number for each in window}
        assert window.digests == {each.group: each.digest for each in window}
        assert window.newest == (window[-1].group, window[-1].number)
        assert window.last_entered(report.progress.issued) == window.newest
        for each in window:
            issued.setdefault((each.group, each.number), set()).add(each.digest)
    assert all(len(digests) == 1 for digests in issued.values())


def drawings(family: str, condition: str = "clean", count: int = 40) -> Iterator[hangs.Hang]:
    made = hangs.Hangs(Job(SMALL))
    for seed in range(count):
        yield made.make(family, condition, np.random.default_rng(seed))


def reports_of(family: str, condition: str = "clean") -> list[RankReport]:
    return [
        report
        for hang in drawings(family, condition)
        for each in (hang, hang.then)
        if each is not None
        for report in each.rounds[-1].reports.values()
    ]


def test_each_kind_of_fault_is_drawn():
    ends = reports_of("crash")
    assert {each.how for each in ends} == {"killed", "failed", "asked", "unknown", None}
    assert {each.process for each in reports_of("stopped")} == {Process.RUNNING, Process.STOPPED}
    assert any(each.stalled is not None and each.how == "killed" for each in reports_of("superseded"))
    assert {each.moving for each in reports_of("pause")} == {True, False}
    steps = [each.progress.step for each in reports_of("stall") if each.progress is not None]
    assert min(steps) > 0, "each job was resumed, or has done some steps"
    assert max(steps) > 100, "some jobs were resumed"
    assert any(not each.groups for each in reports_of("stall")), (
        "some ranks stop before their first operation"
    )
    assert any(each.progress.entered for each in ends if each.progress is not None)


def test_each_kind_of_absence_is_drawn():
    size = SMALL.ranks

    def absent(condition: str) -> list[tuple[int, int]]:
        rounds = [hang.rounds for hang in drawings("stall", condition)]
        return [(size - len(first.reports), size - len(again.reports)) for first, again in rounds]

    assert all(first > 0 for first, _ in absent("late_answers"))
    assert any(again == 0 for _, again in absent("late_answers")), "all answer in the second round"
    for condition in ("dead_observers", "lost_messages", "lost_path"):
        assert all(first == again > 0 for first, again in absent(condition))
    lost = [hang for hang in drawings("stall", "lost_path") if hang.truth.lost]
    assert {len(hang.truth.lost) for hang in lost} == {1, 8}, "some jobs have one rank on each machine"
    for condition, has_closed in (("dead_observers", True), ("lost_path", False)):
        assert all(bool(hang.rounds[1].closed) is has_closed for hang in drawings("stall", condition))
    assert all(not hang.rounds[0].confirmed and hang.rounds[1].is_repeat for hang in lost)


def test_clocks_of_ends_are_skewed():
    shifts = []
    for clean, skewed in zip(drawings("crash"), drawings("crash", "skew"), strict=True):
        reports = skewed.rounds[1].reports
        for rank, report in clean.rounds[1].reports.items():
            if report.gone_seconds is not None:
                shifts.append((reports[rank].gone_seconds or 0.0) - report.gone_seconds)
    assert max(shifts) > 0.4
    assert min(shifts) < 0.1


NOBODY, ONE = Truth(), Truth(frozenset({3}))
PAIR = Truth(group=frozenset({3, 4}))
UNREACHABLE = Truth(frozenset({3}), lost=frozenset({6, 7}))


RECORD = EvidenceRecord(step=1, surface="process", manifestation=Manifestation.HANG, peers=(0,), reason="")


def named(*ranks: int, scope: Scope = Scope.RANK, action: Action = Action.RESTART) -> Incident:
    return incident_from(RECORD, ranks, scope=scope, action=action)


@pytest.mark.parametrize(
    ("truth", "found", "outcome", "alone"),
    [
        (ONE, [named(3)], Outcome.RIGHT, False),
        (ONE, [], Outcome.INCONCLUSIVE, False),
        (ONE, [named(4)], Outcome.WRONG, True),
        (ONE, [named(3), named(4)], Outcome.WRONG, True),
        (ONE, [named(3, 4)], Outcome.WRONG, False),
        (ONE, [named(3, action=Action.REPLACE)], Outcome.WRONG, False),
        (ONE, [named(3, 4, scope=Scope.PROCESS_GROUP)], Outcome.INCONCLUSIVE, False),
        (ONE, [named(4, 5, scope=Scope.PROCESS_GROUP)], Outcome.WRONG, False),
        (
            UNREACHABLE,
            [named(6, 7, scope=Scope.MACHINE, action=Action.REPLACE), named(3)],
            Outcome.RIGHT,
            False,
        ),
        (UNREACHABLE, [named(6, 7, scope=Scope.MACHINE, action=Action.REPLACE)], Outcome.INCONCLUSIVE, False),
        (UNREACHABLE, [named(3, 6, 7, action=Action.REPLACE)], Outcome.WRONG, False),
        (Truth(frozenset({3, 4})), [named(3)], Outcome.INCONCLUSIVE, False),
        (Truth(frozenset({3}), also=frozenset({4})), [named(3, 4)], Outcome.RIGHT, False),
        (PAIR, [named(3, 4, scope=Scope.PROCESS_GROUP)], Outcome.RIGHT, False),
        (PAIR, [named(3)], Outcome.WRONG, True),
        (NOBODY, [], Outcome.RIGHT, False),
        (NOBODY, [named(3)], Outcome.WRONG, True),
        (NOBODY, [named(3, 4, scope=Scope.JOB)], Outcome.WRONG, False),
    ],
)
def test_scores(truth: Truth, found: list[Incident], outcome: Outcome, alone: bool):
    scored = score(truth, found)
    assert (scored.outcome, scored.healthy_alone) == (outcome, alone)


def test_a_wrong_name_is_counted(monkeypatch: pytest.MonkeyPatch):
    """A diagnosis that names the neighbour of whoever ended is wrong in every crash."""
    right = hangs.diagnose

    def wrong(observed: hangs.Round) -> Diagnosis:
        found = right(observed)
        shifted = (
            replace(each, ranks=tuple((r + 1) % SMALL.ranks for r in each.ranks)) for each in found.incidents
        )
        return replace(found, incidents=tuple(shifted))

    monkeypatch.setattr(runner, "FAMILIES", ("crash",))
    assert runner.report_of(SMALL, 20, seed=1)["wrong_rate"] == 0
    monkeypatch.setattr(hangs, "diagnose", wrong)
    report = runner.report_of(SMALL, 20, seed=1)
    assert report["wrong_rate"] > 0.5
    assert report["healthy_named_alone"] > 0
    assert not report["goals"]["wrong_rate"]


@pytest.mark.parametrize(("layout", "scenarios"), [(None, 100), (SMALL, 40)], ids=["small jobs", "4x4x8"])
def test_few_scenarios_name_nobody_wrongly(layout: runner.Layout | None, scenarios: int):
    report = runner.report_of(layout, scenarios, seed=5)
    assert (report["wrong_rate"], report["healthy_named_alone"]) == (0, 0), report["not_right"]
    assert report["right_rate"] > 0.7
    assert {*report["families"]} == {*runner.FAMILIES}
    assert json.loads(json.dumps(report)) == report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megascale-moe", "deepseek-v3", "8x2x2"])
def test_hundreds_of_scenarios(name: str):
    report = runner.report_of(layout_of(name), 15 * len(runner.FAMILIES), seed=11)
    assert (report["wrong_rate"], report["healthy_named_alone"]) == (0, 0), report["not_right"]


def test_seeds_reproduce():
    def outcomes(seed: int) -> list[str]:
        decided = runner.run(SMALL, len(runner.FAMILIES), seed)
        return [repr(replace(each, seconds=0.0)) for each in decided]

    first = outcomes(1)
    assert outcomes(1) == first
    assert outcomes(2) != first


def test_the_command_prints_one_document():
    command = ["simulate", "--layout", "4x2x4", "--scenarios", "20", "--seed", "5", "--json"]
    result = CliRunner().invoke(app, command)
    found = json.loads(result.stdout)
    assert {"right_rate", "wrong_rate", "inconclusive_rate", "seconds"} <= found.keys()
    assert (found["ranks"], found["scenarios"], found["seed"]) == (32, 20, 5)
    assert result.exit_code == (0 if found["goals"]["wrong_rate"] else 1)
    refused = CliRunner().invoke(app, ["simulate", "--layout", "8x16"])
    assert refused.exit_code == 2
    assert "'8x16'" in refused.stderr


def test_an_interrupted_run_reports_what_it_has_decided():
    def show(decided: runner.Decided) -> None:
        if decided.index == 4:
            raise KeyboardInterrupt

    report = runner.report_of(SMALL, 100, seed=1, show=show)
    assert (report["scenarios"], report["interrupted"]) == (5, True)
