"""What the incident of a hang shows: its sentence, its proof, and what was seen of the ranks beside.

Who is named is held by the tables in ``tests/scenarios``.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.scenarios.paper import ALL_GATHER, ALL_TO_ALL, BARRIER, Job, one_each, replicas
from tests.scenarios.today import rounds
from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import Process, RankReport
from torchscout.decision.sentences import code_of
from torchscout.decision.types import Incident, Manifestation, from_json
from torchscout.mesh import Mesh

SPLITS = [[0, 7, 1, 3], [9, 9, 0, 0], [1, 2, 3, 4], [5, 0, 0, 5]]


def incident_of(job: Job) -> Incident:
    """The incident of the last round, after a check of what every incident has."""
    (incident,), _ = rounds.last_round(job)
    written = incident.to_json()
    assert from_json(json.loads(json.dumps(written))).to_json() == written
    return incident


def late(rank: int = 2, phase: str = "input", **settings: str) -> Job:
    job = replicas(**settings)
    return job.enter("world", *job.all_but(rank)).work(phase, rank).ask()


def other_splits() -> Job:
    job = Job(replica=4).steps(2)
    for rank, sends in enumerate(SPLITS):
        receives = (2, 1, 3, 1) if rank == 2 else tuple(row[rank] for row in SPLITS)
        job.enter("world", rank, operation=ALL_TO_ALL, sends=tuple(sends), receives=receives)
    return job.ask()


def opposite_order() -> Job:
    job = Job(replica=4).group("couple", 0, 1).steps(2)
    return job.enter("world", 0, 2, 3).enter("couple", 1, operation=BARRIER).ask()


def on_devices(*, is_behind: bool) -> Job:
    job = replicas().devices_follow(*range(4)).enter("world", *range(4))
    return job.devices_follow(*(job.all_but(2) if is_behind else range(4))).work("idle", *range(4)).ask()


def missed_twice(first: str) -> Job:
    """Rank 0 is missed by 1 and by 2; what rank 1 waits for comes earlier in everybody's program."""
    job = Job(replica=3).group(first, 0, 1).group("m", 0, 2).steps(1).work("forward", 0, 1, 2)
    return job.enter(first, 1).work("forward", 2).enter("m", 2).ask(700)


TOLD = [
    pytest.param(
        late(),
        ["Rank 2 on machine 1", "all_reduce", "number 4 of group world", "in input for 6.", "3 ranks"],
        id="late",
    ),
    pytest.param(
        late(phase="checkpoint write").ask(700), ["Rank 2", "in checkpoint write for 7"], id="checkpoint"
    ),
    pytest.param(replicas().enter("world", 0, 2, 3).stop(1).ask(), ["Rank 1", "stopped"], id="stopped"),
    pytest.param(
        replicas().work("forward", *range(4)).end("killed", 1).ask(0.1),
        ["Rank 1 on machine 0 was killed by SIGKILL in step 4 (forward)."],
        id="killed",
    ),
    pytest.param(
        replicas().enter("world", 0, 2, 3).end("killed", 1).end("failed", 0, 3).ask(0.1),
        ["Rank 1 on machine 0 was killed by SIGKILL", "; ranks 0 and 3 failed because of it."],
        id="killed, and others failed",
    ),
    pytest.param(
        replicas().work("forward", *range(4)).end("unknown", 1).ask(0.1),
        ["Rank 1 on machine 0 has ended in an unknown way in step 4 (forward)."],
        id="ended",
    ),
    pytest.param(
        replicas().enter("world", 0, 1, 3).enter("world", 2, operation=BARRIER).ask(),
        ["Rank 2", "barrier", "number 4 of group world", "all_reduce"],
        id="other operation",
    ),
    pytest.param(
        Job(replica=2).steps(2).enter("world", 0).enter("world", 1, operation=ALL_GATHER).ask(),
        ["all_reduce", "all_gather", "number 3"],
        id="no majority",
    ),
    pytest.param(
        opposite_order(),
        ["rank 0 in all_reduce", "of group world", "rank 1 in barrier", "of group couple"],
        id="opposite order",
    ),
    pytest.param(
        replicas().enter("world", *range(4)).ask(),
        ["All 4 members", "number 4 of group world", "for 6."],
        id="stall",
    ),
    pytest.param(on_devices(is_behind=True), ["Rank 2", "number 4 of group world", "device"], id="device"),
    pytest.param(missed_twice("a"), ["of group a"], id="what was due first"),
    pytest.param(missed_twice("z"), ["of group z"], id="what was due first, by another name"),
    pytest.param(
        replicas().enter("world", 0, 1, 3).no_answer(2).ask().ask(3),
        ["All 4 members but 1", "Rank 2 did not answer"],
        id="absent",
    ),
    pytest.param(
        replicas(6).enter("world", 0, 1, 4, 5).no_answer(2, 3).ask().ask(3),
        ["Machine machine 1 is unreachable", "ranks 2 and 3", "4 ranks"],
        id="lost",
    ),
    pytest.param(
        replicas(6).enter("world", *range(6)).no_answer(2, 3, 4, 5).ask().ask(3),
        ["2 of 6 ranks"],
        id="cut off",
    ),
]


@pytest.mark.parametrize(("job", "facts"), TOLD)
def test_a_sentence_has_the_facts(job: Job, facts: list[str]):
    sentence = incident_of(job).sentence
    assert [each for each in facts if each not in sentence] == [], sentence
    assert sentence[0].isupper()
    assert sentence.endswith(".")


def test_a_sentence_about_many_ranks_is_short():
    job = replicas(32).enter("world", 31).work("forward", *range(31))
    incident = incident_of(job.ask())
    assert incident.ranks == tuple(range(31))
    assert len(incident.sentence) < 500


@pytest.mark.parametrize(
    ("job", "surface", "evidence"),
    [
        (late(), "issued/world", (4, 4, 3, 4)),
        (replicas().enter("world", 0, 1, 3).end("failed", 2).ask(), "process", (0, 0, 1, 0)),
        (other_splits(), "splits/world", (1, 1, 3, 1)),
        (
            replicas(machines=one_each(4)).enter("world", 0, 1, 3).no_answer(2).ask().ask(3),
            "issued/world",
            (4, 4, -1, 4),
        ),
        (on_devices(is_behind=True), "entered/world", (4, 4, 3, 4)),
    ],
    ids=["late", "ended", "splits", "absent", "device"],
)
def test_the_first_record_proves_it(job: Job, surface: str, evidence: tuple[int, ...]):
    incident = incident_of(job)
    deciding = incident.records[0]
    assert (deciding.surface, deciding.peers, deciding.ranks) == (surface, (0, 1, 2, 3), (2,))
    assert deciding.verdict is not None
    assert deciding.verdict.evidence == evidence
    assert deciding.stall_seconds >= 6.0


def test_the_last_operations_of_a_rank_that_differs_are_shown():
    job = replicas().enter("world", 0, 1, 3).enter("world", 2, operation=BARRIER).ask()
    deciding = incident_of(job).records[0]
    assert deciding.surface == "fingerprint/world"
    assert [each.startswith("barrier") for each in deciding.fingerprints] == [False] * 3 + [True]


def test_a_difference_in_which_the_named_rank_has_no_part_proves_nothing():
    job = Job(replica=5).group("three", 0, 1, 2).group("pair", 3, 4).steps(2)
    for group, other in (("three", 2), ("pair", 4)):
        members = [rank for rank in job.groups[group] if rank != other]
        job.enter(group, *members).enter(group, other, operation=BARRIER)
    incident = incident_of(job.ask())
    assert incident.ranks == (2,)
    assert {each.surface.split("/")[-1] for each in incident.records} & {"three", "pair"} == {"three"}


def test_equal_ranks_are_compared_too_and_do_not_decide():
    """One rank is ahead of all others, and differs from the majority, which is late."""
    incident = incident_of(replicas(machines=one_each(4)).enter("world", 3).work("input", 0, 1, 2).ask())
    (vote,) = [each for each in incident.records if each.surface == "coordinate"]
    assert vote.ranks != incident.ranks == (0, 1, 2)


def test_stacks_of_the_named_rank_and_of_a_few_others_are_shown():
    (incident,), reports = rounds.last_round(late(stacks="shown"))
    shown = {each.progress["rank"]: each.progress["stack"] for each in incident.records if each.progress}
    assert shown == {rank: reports[rank].stack for rank in range(4)}


def test_the_line_of_code_is_the_innermost_one_of_the_user_in_the_main_thread():
    frames = ("/lib/python3.11/threading.py wait", "/home/me/train.py load_batch", "/home/me/train.py main")
    sentence = incident_of(late(stacks="shown").stack(2, *frames).ask()).sentence
    assert ", at train.py:1 in load_batch" in sentence


@pytest.mark.parametrize(
    ("main", "expected"), [("/home/me/train.py", "train.py:7 in run"), ("/env/site-packages/a.py", "")]
)
def test_no_other_thread_gives_the_line_of_code(main: str, expected: str):
    threads = [f'Thread:\n  File "{file}", line 7 in run\n' for file in (main, "/home/me/load.py")]
    assert code_of("\n".join(threads)) == expected


def test_operations_that_the_flight_recorder_knows_as_open_are_shown():
    _, reports = rounds.last_round(late())
    known = {"step": 3, "open": 1, "operations": [{"operation": "all_reduce", "state": "started"}]}
    given = reports | {1: replace(reports[1], operations=known)}
    (incident,) = diagnose(Round(given, Mesh.grid(replica=4))).incidents
    (record,) = [each for each in incident.records if each.surface == "flight_recorder"]
    assert (record.peers, record.progress["operations"]) == ((1,), known["operations"])


def test_a_trainer_that_died_before_it_published_anything_is_named():
    _, reports = rounds.last_round(replicas().enter("world", 0, 1, 2).ask())
    gone = RankReport(3, Process.GONE, gone_seconds=1.0, how="failed", wait_status=1 << 8)
    (incident,) = diagnose(Round(reports | {3: gone}, Mesh.grid(replica=4))).incidents
    assert (incident.manifestation, incident.ranks) == (Manifestation.CRASH, (3,))
    assert "failed with exit status 1 before its first step" in incident.sentence


def test_without_known_groups_nobody_is_named():
    _, reports = rounds.last_round(late())
    without = {rank: replace(each, groups=()) for rank, each in reports.items()}
    assert diagnose(Round(without, Mesh.grid(replica=4))).incidents == ()
    assert diagnose(Round({}, Mesh.grid(replica=4))).incidents == ()


def test_a_count_beyond_any_job_accuses_nobody_who_did_not_answer():
    _, reports = rounds.last_round(late())
    (group,) = (each.key for each in reports[3].groups if len(each.members) == 4)
    progress = reports[3].progress
    assert progress is not None
    damaged = replace(progress, issued={**progress.issued, group: (1 << 63) - 1})
    answered = {rank: each for rank, each in reports.items() if rank} | {
        3: replace(reports[3], progress=damaged)
    }
    assert all(0 not in each.ranks for each in diagnose(Round(answered, Mesh.grid(replica=4))).incidents)


def lost_connections() -> tuple[dict[int, RankReport], RankReport]:
    """Ranks 0, 1 and 3 have just failed in a collective that rank 2 has not entered; rank 2 as it is then."""
    _, reports = rounds.last_round(late())
    gone = {"process": Process.GONE, "gone_seconds": 0.05, "how": "failed", "wait_status": 1 << 8}
    failed = {rank: replace(reports[rank], **gone) for rank in (0, 1, 3)}
    return failed, reports[2]


def test_a_killed_rank_whose_process_still_ends_is_named_and_not_those_that_lost_it():
    failed, dying = lost_connections()
    early = diagnose(Round(failed | {2: dying}, Mesh.grid(replica=4)))
    assert (early.incidents, early.needs_another_round, early.is_early) == ((), True, True)
    killed = replace(dying, process=Process.GONE, gone_seconds=0.4, how="killed", wait_status=9)
    (incident,) = diagnose(Round(failed | {2: killed}, Mesh.grid(replica=4), is_repeat=True)).incidents
    assert (incident.manifestation, incident.ranks) == (Manifestation.CRASH, (2,))


def test_who_fails_shortly_after_posting_an_operation_may_have_lost_a_dying_rank():
    job = replicas().work("input", 2).post("world", 0, 1, 3).work("backward", 0, 1, 3).end("failed", 0)
    _, reports = rounds.last_round(job.ask(0.1))
    assert diagnose(Round(reports, Mesh.grid(replica=4))).is_early
    (incident,) = diagnose(Round(reports, Mesh.grid(replica=4), is_repeat=True)).incidents
    assert incident.ranks == (0,)


def test_who_failed_alone_is_named_once_nobody_else_has_died():
    failed, alive = lost_connections()
    alone = {2: alive, 1: replace(alive, rank=1), 3: replace(alive, rank=3), 0: failed[0]}
    assert diagnose(Round(alone, Mesh.grid(replica=4))).is_early
    (incident,) = diagnose(Round(alone, Mesh.grid(replica=4), is_repeat=True)).incidents
    assert incident.ranks == (0,)
