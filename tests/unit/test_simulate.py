"""The simulator: its layouts, how faults spread, the scores, and that the product's functions decide."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from torchscout.cli.main import app
from torchscout.decision import sdc
from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.progress import Process
from torchscout.decision.recovery import policy
from torchscout.decision.straggler import diagnosis
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.observer.rounds import diagnosis as round_diagnosis
from torchscout.observer.rounds import hub
from torchscout.observer.rounds.post_writer import post_of
from torchscout.replay import replayer
from torchscout.session import recovery
from torchscout.session.replay import driver as replay_driver
from torchscout.simulate import hangs, numbers, runner, slowness
from torchscout.simulate.job import Job
from torchscout.simulate.layouts import PUBLISHED, layout_of
from torchscout.simulate.reports import Reporter, Stand
from torchscout.simulate.scoring import Outcome, Truth, score
from torchscout.simulate.spread import Faults, spread

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


@pytest.mark.parametrize("name", ["4x4x8", "1x4x8x4", "8x1x4"])
def test_a_stopped_rank_stops_all_and_waits_for_nobody(name: str):
    job = Job(layout_of(name))
    for rank in range(0, job.size, 1 + job.size // 6):
        for slot in job.programs[int(job.stage[rank])][::5]:
            standing = spread(job, Faults(stops={rank: slot.tick}))
            assert (standing.tick < 2 * len(job.ticks)).all(), "every rank has stopped"
            assert np.flatnonzero(~standing.inside).tolist() == [rank]
            assert standing.waited_for[rank]


def test_members_of_a_line_have_the_same_operations():
    """They issue the same number of the same line at the same tick, with the same fingerprint."""
    job, made = Job(SMALL), hangs.Hangs(Job(SMALL))
    issued: dict[tuple[str, int], set[int]] = {}
    for rank in range(job.size):
        length = len(job.programs[int(job.stage[rank])])
        for each in made.reporter.report(rank, Stand(42 * length)).status.progress.recent:
            issued.setdefault((each.line, each.number), set()).add(each.digest)
    assert all(len(digests) == 1 for digests in issued.values())


@pytest.mark.parametrize("name", ["4x4x8", "1x4x8x4", "megascale-moe"])
def test_posts_are_those_that_observers_send(name: str):
    job = Job(layout_of(name))
    reporter = Reporter(job)
    for stand in (
        Stand(5000),
        Stand(3000, 2950, None, at_communication=False, device_busy=False),
        Stand(5000, waiting=False, moving=True, silent_seconds=1.5),
    ):
        for rank in range(0, job.size, 7):
            assert reporter.post(rank, stand).data == post_of(reporter.report(rank, stand), 1)


def incident(*ranks: int, scope: Scope = Scope.RANK) -> Incident:
    record = EvidenceRecord(
        step=1,
        surface="process",
        manifestation=Manifestation.HANG,
        peers=(0,),
        verdict=Verdict(Status.ATTRIBUTED, (0,), (1,)),
    )
    return Incident(
        manifestation=Manifestation.HANG,
        scope=scope,
        step=1,
        ranks=ranks,
        hosts=(),
        records=(record,),
        action=Action.RESTART,
        sentence="Something.",
    )


ONE, PAIR, NOBODY = Truth(frozenset({3})), Truth(group=frozenset({3, 4})), Truth()


@pytest.mark.parametrize(
    ("truth", "found", "outcome", "alone"),
    [
        (ONE, [incident(3)], Outcome.RIGHT, False),
        (ONE, [], Outcome.INCONCLUSIVE, False),
        (ONE, [incident(4)], Outcome.WRONG, True),
        (ONE, [incident(3), incident(4)], Outcome.WRONG, True),
        (ONE, [incident(3, 4)], Outcome.WRONG, False),
        (ONE, [incident(3, 4, scope=Scope.PROCESS_GROUP)], Outcome.INCONCLUSIVE, False),
        (ONE, [incident(4, 5, scope=Scope.PROCESS_GROUP)], Outcome.WRONG, False),
        (Truth(frozenset({3}), unseen=frozenset({4})), [incident(3, 4)], Outcome.INCONCLUSIVE, False),
        (Truth(frozenset({3}), unseen=frozenset({4})), [incident(4)], Outcome.WRONG, True),
        (Truth(frozenset({3, 4})), [incident(3)], Outcome.INCONCLUSIVE, False),
        (Truth(frozenset({3}), also=frozenset({4})), [incident(3, 4)], Outcome.RIGHT, False),
        (PAIR, [incident(3, 4, scope=Scope.PROCESS_GROUP)], Outcome.RIGHT, False),
        (PAIR, [incident(3)], Outcome.WRONG, True),
        (NOBODY, [], Outcome.RIGHT, False),
        (NOBODY, [incident(3)], Outcome.WRONG, True),
    ],
)
def test_scores(truth: Truth, found: list[Incident], outcome: Outcome, alone: bool):
    scored = score(truth, found)
    assert (scored.outcome, scored.healthy_alone) == (outcome, alone)


def test_simulator_and_product_call_the_same_functions():
    assert hangs.conclude is round_diagnosis.conclude
    assert hangs.Round is hub.Round
    assert slowness.Stragglers is diagnosis.Stragglers
    assert numbers.SdcDiagnosis is sdc.SdcDiagnosis is replay_driver.SdcDiagnosis
    assert numbers.SurfaceHistory is replayer.SurfaceHistory
    assert runner.decide is policy.decide is recovery.decide


def outcomes(seed: int) -> list[tuple[str, str, str]]:
    decided = runner.run(SMALL, len(runner.FAMILIES), seed)
    return [(each.family, each.condition, repr(each.score) + repr(each.observer_bytes)) for each in decided]


def test_seeds_reproduce():
    first = outcomes(1)
    assert outcomes(1) == first
    assert outcomes(2) != first


@pytest.mark.parametrize("family", hangs.FAMILIES)
def test_every_hang_is_decided_in_a_clean_round(family: str):
    job = Job(SMALL)
    made = hangs.Hangs(job)
    for seed in range(6):
        hang = made.make(family, "clean", np.random.default_rng(seed))
        found = hang.decide(job)
        scored = score(hang.truth, found)
        assert scored.outcome is not Outcome.WRONG, scored.sentence
        if family in ("stall", "crash", "stopped", "lost_host", "divergence", "transport", "pause"):
            assert scored.outcome is Outcome.RIGHT, scored.sentence


def test_a_wrong_decision_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """A diagnosis that names the first gone trainer's neighbour is scored as wrong."""
    job = Job(SMALL)
    hang = hangs.Hangs(job).make("crash", "clean", np.random.default_rng(0))
    (culprit,) = hang.truth.ranks
    assert hang.reports[culprit].status.process is Process.GONE
    monkeypatch.setattr(hangs, "conclude", lambda *_, **__: incident((culprit + 1) % job.size))
    assert score(hang.truth, hang.decide(job)).healthy_alone


def test_a_job_of_1024_ranks_with_every_family():
    report = runner.report_of(layout_of("8x4x32"), 2 * len(runner.FAMILIES), seed=3)
    assert (report["wrong_rate"], report["healthy_named_alone"], report["healthy_replaced"]) == (0, 0, 0)
    assert report["right_rate"] > 0.8
    assert report["bytes"]["hub"] > 1024 * 1000
    assert json.loads(json.dumps(report)) == report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megascale-moe", "deepseek-v3", "8x2x2"])
def test_hundreds_of_scenarios(name: str):
    report = runner.report_of(layout_of(name), 15 * len(runner.FAMILIES), seed=11)
    assert (report["wrong_rate"], report["healthy_named_alone"]) == (0, 0), report["not_right"]


def test_the_command_prints_one_document():
    command = ["simulate", "--layout", "4x2x4", "--scenarios", "19", "--seed", "5", "--json"]
    result = CliRunner().invoke(app, command)
    found = json.loads(result.stdout)
    wanted = {"right_rate", "wrong_rate", "inconclusive_rate", "seconds", "bytes"}
    assert wanted <= found.keys()
    assert (found["ranks"], found["scenarios"], found["seed"]) == (32, 19, 5)
    assert result.exit_code == (0 if found["goals"]["wrong_rate"] else 1)


def test_an_interrupted_run_reports_what_it_has_decided():
    def show(decided: runner.Decided) -> None:
        if decided.index == 4:
            raise KeyboardInterrupt

    report = runner.report_of(SMALL, 100, seed=1, show=show)
    assert (report["scenarios"], report["interrupted"]) == (5, True)


def test_experts_of_deepseek_fill_eight_machines_and_no_group_tells_these_apart():
    """So a slow machine there cannot be named by the times of collectives: all eight have the same groups."""
    job = Job(PUBLISHED["deepseek-v3"])
    hosts = {
        line: frozenset(job.mesh.hosts_of(job.members(line)))
        for kind in ("expert", "replica")
        for line in np.unique(job.line_of[kind]).tolist()
    }
    assert sorted({len(each) for each in hosts.values()}) == [8, 16]
    for first in range(0, job.size, 64):
        of_machine = [
            {int(job.line_of[kind][rank]) for kind in ("expert", "replica") for rank in range(host, host + 8)}
            for host in range(first, first + 64, 8)
        ]
        assert all(each == of_machine[0] for each in of_machine)
