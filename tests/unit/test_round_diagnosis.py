"""From the reports of a round to an incident: who moves, who is excused, who was gone first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh
from torchscout.observer.rounds.diagnosis import conclude
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.rank_report import RankReport

SIZE = 4
WORLD = CommGroup("world", tuple(range(SIZE)), "world")
MESH = Mesh.grid(replica=SIZE, hosts=["a", "a", "b", "b"])


def report(rank: int, issued: int = 5, *, stack: str = "File ...", last: int = 7, **more) -> RankReport:
    prints = {number: last if number == issued else 7 for number in range(1, issued + 1)}
    recent = tuple(
        IssuedOp("world", number, each, number * each, "barrier") for number, each in prints.items()
    )
    progress = Progress(
        rank,
        step=3,
        operation=2,
        phase=Phase.FORWARD,
        issued={"world": issued},
        recent=recent,
        at_communication=issued == 5,
        silent_seconds=6.0,
    )
    return RankReport(RankStatus(rank, Process.RUNNING, progress, stack=stack), (WORLD,), **more)


def gone(rank: int, seconds: float, issued: int = 4, **more: bool) -> RankReport:
    """Its trainer ended outside of any operation, or with ``issued=5`` in that one."""
    alive = report(rank, issued, stack="", gone_seconds=seconds, **more)
    return replace(alive, status=replace(alive.status, process=Process.GONE))


def test_of_those_that_ended_together_the_killed_one_is_named():
    """As it was seen: whoever loses a connection to it fails within milliseconds."""
    reports = {rank: gone(rank, 1.0 + rank / 1000) for rank in range(3)} | {3: report(3, moving=True)}
    assert conclude(reports, MESH).ranks == (0, 1, 2)
    reports[1] = replace(reports[1], was_killed=True)
    assert conclude(reports, MESH).ranks == (1,)


def test_what_ends_after_a_rank_that_restarts_the_job_is_a_consequence():
    reports = {rank: report(rank, moving=True) for rank in (2, 3)} | {0: gone(0, 1.0), 1: gone(1, 0.5)}
    assert conclude(reports, MESH).ranks == (0,)
    reports[0] = replace(reports[0], is_restarting=True)
    assert conclude(reports, MESH) is None


def timed_out(rank: int, issued: int = 5, seconds: float = 0.5) -> RankReport:
    """Its trainer waited for 5.5 seconds before something ended it."""
    alive = report(rank, issued, stack="", gone_seconds=seconds)
    return replace(
        alive,
        status=replace(alive.status, process=Process.GONE),
        stalled=alive.status.progress,
    )


def round_of(*different: RankReport) -> dict[int, RankReport]:
    """Everybody waits in number 5, but for these."""
    return {rank: report(rank) for rank in range(SIZE)} | {each.status.rank: each for each in different}


def test_a_rank_that_has_not_entered_is_named_with_a_few_stacks():
    incident = conclude(round_of(report(2, 4, stack="File lagging")), MESH)
    assert (incident.scope, incident.ranks, incident.hosts) == (Scope.RANK, (2,), ("b",))
    stacks = {record.progress["rank"]: record.progress["stack"] for record in incident.records}
    assert stacks == {2: "File lagging", 0: "File ...", 1: "File ...", 3: "File ..."}


def test_ranks_that_a_watchdog_ended_for_waiting_are_not_blamed():
    incident = conclude(round_of(report(2, 4), timed_out(0), timed_out(1)), MESH)
    assert incident.ranks == (2,)
    assert incident.sentence.endswith(" The trainers of ranks 0 and 1 ended after waiting for too long.")
    # Nor if the one they waited for was ended soon after them.
    assert conclude(round_of(timed_out(2, 4, 0.2), timed_out(0), timed_out(1)), MESH).ranks == (2,)


def test_ranks_that_a_slow_watchdog_ended_are_not_blamed():
    """Who was late has come, all went on, and only then does the watchdog end those who had waited."""
    late = report(2, 5)
    moved = replace(late, status=replace(late.status, progress=report(2, 6).status.progress), moving=True)
    reports = round_of(
        replace(moved, stalled=report(2, 4).status.progress),
        *(replace(timed_out(rank, 6), stalled=report(rank).status.progress) for rank in (0, 1)),
    )
    assert conclude(reports, MESH).ranks == (2,)


def test_a_trainer_that_ends_after_a_long_silence_of_its_own_is_named():
    assert conclude(round_of(timed_out(2, 4)), MESH).ranks == (2,)


def test_trainers_that_end_after_waiting_for_nobody_in_particular_are_named_together():
    incident = conclude({rank: timed_out(rank) for rank in range(SIZE)}, MESH)
    assert incident.ranks == tuple(range(SIZE))


def test_open_operations_of_the_flight_recorder_are_in_the_incident():
    shown = {"step": 3, "open": 1, "operations": [{"operation": "all_reduce", "state": "started"}]}
    incident = conclude(round_of(report(2, 4), report(1, operations=shown)), MESH)
    (record,) = [each for each in incident.records if each.surface == "flight_recorder"]
    assert (record.peers, record.progress["operations"]) == ((1,), shown["operations"])
    assert record.verdict is None


def test_the_first_round_blames_nobody_while_a_rank_moves():
    assert conclude(round_of(report(2, 4, moving=True)), MESH) is None


@pytest.mark.parametrize("insistent", [False, True])
def test_an_excused_rank_is_not_blamed(insistent: bool):
    assert conclude(round_of(report(2, 4, excused=True)), MESH, insistent=insistent) is None


def test_an_excused_rank_is_blamed_if_a_waiting_rank_is_close_to_its_timeout():
    reports = round_of(report(2, 4, excused=True), report(0, is_pressed=True))
    assert conclude(reports, MESH).ranks == (2,)


def test_an_excused_rank_does_not_cover_for_a_late_one():
    assert 1 in conclude(round_of(report(1, 4), report(2, 4, excused=True)), MESH).ranks


def test_a_rank_that_ended_is_named_while_all_others_move():
    reports = {rank: report(rank, 4, moving=True) for rank in range(SIZE)} | {1: gone(1, 0.001)}
    incident = conclude(reports, MESH)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (1,), Action.RESTART)
    assert (
        incident.sentence == "The trainer of rank 1 on a ended before it had finished, in forward of step 3."
    )
    assert (incident.records[0].surface, incident.records[0].ranks) == ("process", (1,))


def test_a_rank_that_diverged_is_named_although_the_library_ended_another():
    reports = {rank: report(rank, moving=True) for rank in range(SIZE)} | {2: report(2, last=8, moving=True)}
    alive = reports[1]
    reports[1] = replace(alive, gone_seconds=0.001, status=replace(alive.status, process=Process.GONE))
    without_a_report = {rank: each for rank, each in reports.items() if rank != 3}
    for given in (reports, without_a_report):
        incident = conclude(given, MESH)
        assert (incident.ranks, incident.records[0].surface) == ((2,), "fingerprint/world")


def test_a_diverged_group_is_undecided_only_once_no_moving_rank_can_join():
    """The library ends one of two that differ at once, before the others have come as far."""
    reports = {rank: report(rank, 4, moving=True) for rank in range(SIZE)} | {
        2: report(2, last=8, moving=True)
    }
    ended = report(1)
    reports[1] = replace(ended, gone_seconds=0.001, status=replace(ended.status, process=Process.GONE))
    assert conclude(reports, MESH) is None
    majority = reports | {rank: report(rank, moving=True) for rank in (0, 3)}
    assert conclude(majority, MESH).ranks == (2,)
    for incident in (
        conclude(reports, MESH, insistent=True),
        conclude({rank: replace(each, moving=False) for rank, each in reports.items()}, MESH),
    ):
        assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def test_only_the_trainers_that_ended_first_are_named():
    reports = {0: report(0, moving=True), 1: gone(1, 0.5), 2: gone(2, 0.1), 3: gone(3, 0.499)}
    assert conclude(reports, MESH).ranks == (1, 3)


def test_trainers_that_ended_in_an_operation_with_an_absent_rank_are_not_named():
    """As it was seen: rank 2 was killed with its observer, and its peers failed as they lost connections."""
    incident = conclude({rank: gone(rank, 0.1, issued=5) for rank in (0, 1, 3)}, MESH)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))
    assert (incident.action, incident.records[0].status) == (Action.RESTART, "inconclusive")
    assert incident.sentence == (
        "The trainers of ranks 0, 1, 3 ended before they had finished. "
        "Rank 2 did not answer: its trainer may have ended first."
    )


@pytest.mark.parametrize(
    "ended", [gone(1, 0.1), gone(1, 0.1, issued=5, was_killed=True)], ids=["outside", "killed"]
)
def test_a_trainer_that_ended_for_another_reason_is_named_although_a_rank_is_absent(ended: RankReport):
    incident = conclude({0: report(0, moving=True), 1: ended, 3: report(3, moving=True)}, MESH)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))


def test_a_trainer_that_ended_in_an_operation_is_named_if_all_others_answer():
    incident = conclude(round_of(gone(1, 0.1, issued=5)), MESH)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))


@pytest.mark.parametrize(
    ("ranks", "scope", "action"),
    [
        ((2, 3), Scope.MACHINE, Action.INSPECT),
        ((1, 2), Scope.RANK, Action.RESTART),
        ((0, 1, 2, 3), Scope.JOB, Action.RESTART),
    ],
)
def test_several_that_ended_together(ranks: tuple[int, ...], scope: Scope, action: Action):
    reports = {rank: report(rank, moving=True) for rank in range(SIZE)} | {
        rank: gone(rank, 1.0) for rank in ranks
    }
    incident = conclude(reports, MESH)
    assert (incident.scope, incident.ranks, incident.action) == (scope, ranks, action)


def test_when_all_are_silent_the_diagnosis_explains_the_death():
    incident = conclude(round_of(gone(2, 6.0)), MESH)
    assert incident.ranks == (2,)
    assert "barrier number 5" in incident.sentence


def test_a_pause_of_all_is_no_incident():
    assert conclude({rank: report(rank, 4) for rank in range(SIZE)}, MESH) is None


def test_a_report_survives_serialization():
    sent = [report(1, excused=True, stack=""), report(2, moving=True, stack=""), gone(3, 0.25)]
    for each in sent:
        assert Post(post_of(each), SIZE).report() == each


def across(*answered: int) -> dict[int, RankReport]:
    """Those who answered, of six ranks on three machines that all wait in one collective."""
    world = CommGroup("world", tuple(range(6)), "world")
    return {rank: replace(report(rank), lines=(world,)) for rank in answered}


@pytest.mark.parametrize("trainers_ended", [False, True])
def test_a_minority_does_not_say_that_all_others_are_gone(trainers_ended: bool):
    """As it was seen: the hub of a machine that was cut off would have had all other machines replaced."""
    mesh = Mesh.grid(replica=6, hosts=[*"aabbcc"])
    ended = {"gone_seconds": 1.0} if trainers_ended else {}
    few, most = across(0, 1), across(2, 3, 4, 5)
    for reports in (few, most):
        for rank, each in reports.items():
            process = Process.GONE if trainers_ended else Process.RUNNING
            reports[rank] = replace(each, status=replace(each.status, process=process), **ended)
    cut_off, told = conclude(few, mesh), conclude(most, mesh)
    assert (told.scope, told.ranks, told.action) == (Scope.MACHINE, (0, 1), Action.REPLACE)
    assert (cut_off.scope, cut_off.action) == (Scope.JOB, Action.INSPECT)
    assert cut_off.records[0].status == "inconclusive"
    assert cut_off.sentence == (
        "Only 2 of 6 ranks answered. The others are gone, or these are cut off from them."
    )
