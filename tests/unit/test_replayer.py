"""Recipes that are due after a step run in step on all ranks, even if one of them fails."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.planned_replay import Act, Planned, Rank, checked, fails, job, named, statuses
from tests.support.thread_peers import CountedChannel, ThreadPeers, on_threads
from tests.support.update_job import flip_lowest_bit
from torchscout.c3.signature import PendingSignatures
from torchscout.errors import ChannelError, ReplayError
from torchscout.replay.recipe import Observation
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.replay.replayer import Replayer
from torchscout.replay.schedule import Rotation
from torchscout.replay.verdicts import Findings
from torchscout.state.table import StateTable
from torchscout.utils.reentrancy import in_own_work

ORDER = ["begin", "describe", "prepare", "align", "comparisons", "observe", "release"]


def test_healthy_ranks_agree_and_make_the_calls_in_their_order():
    ranks = job()
    outcomes = checked(ranks)
    assert [statuses(each.records) for each in outcomes] == [{"a/input": "agree", "a/output": "agree"}] * 3
    assert [each.repeats for each in outcomes] == [[]] * 3
    assert [rank.recipes[0].call_names() for rank in ranks] == [ORDER] * 3


def test_every_description_comes_to_every_peer_in_peer_order():
    ranks = job()
    checked(ranks)
    for rank in ranks:
        assert ("prepare", ([{"rank": 0}, {"rank": 1}, {"rank": 2}], 0)) in rank.recipes[0].calls


def test_scouts_own_hooks_are_inert_while_it_works():
    ranks = job()
    checked(ranks)
    assert all(("describe", True) in rank.recipes[0].calls for rank in ranks)
    assert not in_own_work()


def test_targets_and_sources_rotate_with_the_rounds():
    ranks = job()
    checked(ranks, steps=4)
    for rank in ranks:
        begun = [detail for call, detail in rank.recipes[0].calls if call == "begin"]
        assert [target for target, _ in begun] == [0, 1, 0, 1]
        assert [is_source for _, is_source in begun] == [rank.rank == source for source in (0, 1, 2, 0)]
        assert rank.recipes[0].received == [10, 11, 12, 10], "the source's value on every rank"


def test_the_source_is_one_position_in_all_peer_groups():
    ranks = job(lambda *_: None, (0, 2), (1, 3))
    checked(ranks, steps=2)
    begun = [[d for call, d in rank.recipes[0].calls if call == "begin"] for rank in ranks]
    assert [[is_source for _, is_source in each] for each in begun] == [
        [True, False],
        [True, False],
        [False, True],
        [False, True],
    ]


@pytest.mark.parametrize("call", ["begin", "describe", "prepare"])
def test_a_replay_that_one_rank_is_not_ready_for_runs_nowhere(call: str):
    ranks = job(fails(1, call))
    for outcome in checked(ranks):
        (record,) = outcome.records
        assert (record.surface, record.status) == ("a/layer", "not_checked")
        # Before peers compare notes it is a rule of the recipe; afterwards they do not fit each other.
        rule = "" if call == "prepare" else "cannot be replayed: "
        assert record.reason == f"{rule}rank 1: there is no room"
        assert outcome.repeats == []
    call_names = [rank.recipes[0].call_names() for rank in ranks]
    assert not any("align" in each or "observe" in each for each in call_names)
    released = [each.count("release") for each in call_names]
    assert released == ([1, 0, 1] if call == "begin" else [1, 1, 1])


def test_an_exception_on_another_rank_is_reported_with_its_type():
    outcome = checked(job(fails(2, "describe", MemoryError("512 MiB"))))[0]
    assert outcome.records[0].reason == "rank 2: MemoryError: 512 MiB"


def test_a_description_that_cannot_be_sent_is_reported_and_strands_no_rank():
    ranks = job(lambda rank, call, _: {"tensor": object()} if (rank, call) == (0, "describe") else None)
    for outcome in checked(ranks):
        (record,) = outcome.records
        assert record.reason is not None
        assert record.reason.startswith("rank 0: TypeError: Object of type object is not JSON")


def test_a_rank_of_another_peer_group_that_is_not_ready_stops_this_one_too():
    ranks = job(fails(3, "prepare"), (0, 2), (1, 3))
    for outcome in checked(ranks):
        assert outcome.records[0].reason == "rank 3: there is no room"
    assert not any("align" in rank.recipes[0].call_names() for rank in ranks)


def test_work_that_cannot_be_done_leaves_other_work_alone():
    every = ThreadPeers.create_all((0, 1, 2))
    ranks = [
        Rank(
            peers,
            [Planned(peers.rank, fails(1, "describe")), Planned(peers.rank, kind="output", varies=False)],
        )
        for peers in every
    ]
    for outcome in checked(ranks):
        assert statuses(outcome.records) == {
            "a/layer": "not_checked",
            "a/input": "agree",
            "a/output": "agree",
        }


@pytest.mark.parametrize("error", [ReplayError("a lost kernel"), ZeroDivisionError("a lost kernel")])
def test_a_rank_that_fails_in_its_computation_is_no_evidence_and_the_others_still_vote(error: Exception):
    ranks = job(fails(1, "observe", error), (0, 1, 2, 3))
    for rank, outcome in enumerate(checked(ranks)):
        given, output, failed = outcome.records
        assert (given.surface, given.status, given.peers) == ("a/input", "agree", (0, 1, 2, 3))
        assert (output.surface, output.status, output.peers) == ("a/output", "agree", (0, 2, 3))
        assert failed.status == "not_checked"
        assert failed.peers == (1,)
        own = "" if rank != 1 else ": a lost kernel"
        kind = "" if rank != 1 or isinstance(error, ReplayError) else ": ZeroDivisionError"
        assert failed.reason == f"replay failed on rank 1{kind}{own}"
    assert [rank.recipes[0].call_names() for rank in ranks] == [ORDER] * 4


def wrong_output(rank: int, only: float | None = None) -> Act:
    def act(here: int, call: str, variant: float) -> int:
        return int(here == rank and call == "observe" and only in (None, variant))

    return act


def test_a_rank_that_was_named_is_not_replayed_so_often_again():
    ranks = job(wrong_output(2))
    checked(ranks)
    before = ranks[0].recipes[0].call_names().count("observe")
    for outcome in on_threads([rank.peers for rank in ranks], lambda peers: ranks[peers.rank].step(2)):
        assert named(outcome.records) == {("b/output", "forward"): (2,)}
    assert ranks[0].recipes[0].call_names().count("observe") == before + 2


def test_a_failed_rank_alone_calls_for_no_second_replay():
    ranks = job(fails(1, "observe"))
    assert [outcome.repeats for outcome in checked(ranks)] == [[]] * 3


def test_a_variant_that_fails_leaves_the_others():
    def act(rank: int, call: str, variant: float) -> None:
        if (rank, call, variant) == (0, "observe", 10.0):
            raise OverflowError("too large")

    for rank, outcome in enumerate(checked(job(act, variants=(1.0, 10.0)))):
        failed = [record for record in outcome.records if record.verdict is None]
        assert [record.mode for record in failed] == ["forward x10"]
        assert ("too large" in str(failed[0].reason)) == (rank == 0)


def test_what_does_not_vary_is_observed_once():
    every = ThreadPeers.create_all((0, 1))
    ranks = [Rank(peers, [Planned(peers.rank, varies=False)], variants=(0.1, 10.0)) for peers in every]
    checked(ranks)
    for rank in ranks:
        assert [detail for call, detail in rank.recipes[0].calls if call == "observe"] == [1.0]


def test_all_that_is_compared_shares_few_exchanges():
    ranks = job(variants=(1.0, 0.1))
    checked(ranks)
    # The descriptions, the vote, one tensor, the evidence of all variants.
    assert [rank.peers.exchanges for rank in ranks] == [4, 4, 4]


@pytest.mark.parametrize("failing", [None, 1])
def test_no_rank_waits_for_its_device_before_all_have_joined_the_broadcast_on_devices(failing: int | None):
    ranks = []
    for peers in ThreadPeers.create_all((0, 1, 2), timeout=2.0):
        peers.evidence = CountedChannel(peers.metadata)  # as over another network

        def broadcast(_: torch.Tensor, *, source: int, rank: int = peers.rank) -> None:
            """Return at once, as an operation of a device does."""
            if rank == failing:
                raise ChannelError("no memory")

        peers.broadcast = broadcast  # type: ignore[method-assign]
        ranks.append(Rank(peers, [Planned(peers.rank)]))
    with nullcontext() if failing is None else pytest.raises(ChannelError):
        checked(ranks)
    replayed = ["observe" in rank.recipes[0].call_names() for rank in ranks]
    assert replayed == [failing is None] * 3


def test_all_state_is_exchanged_in_full_only_where_it_differs():
    """Two digests are compared first; who differs is then found by name, as if all had been exchanged."""
    found = {}
    for wrong in (None, 2):
        ranks = []
        for peers in ThreadPeers.create_all((0, 1, 2)):
            held = {f"w{place}": torch.full((2,), float(place)) for place in range(50)}
            if peers.rank == wrong:
                flip_lowest_bit(held["w7"])
            ranks.append(Rank(peers, [ReplicatedStateRecipe(StateTable(held).view())]))
        outcomes = checked(ranks)
        assert len({rank.peers.exchanges for rank in ranks}) == 1
        found[wrong] = ranks[0].peers.exchanges
        for outcome in outcomes:
            (sum_of_all, *others) = sorted(outcome.records, key=lambda record: record.surface)
            assert (sum_of_all.surface, sum_of_all.status) == ("state/parameters", "agree")
            assert named(others) == ({} if wrong is None else {("w7", "state"): (2,)})
    # Descriptions, the vote, the evidence; then in detail, a second reading, and who was named.
    assert found == {None: 3, 2: 3 + 1 + 2 + 1}


def test_a_rank_without_a_signature_has_all_state_exchanged_in_full():
    """Its digest stands for nothing, and must not be compared."""
    ranks = []
    for peers in ThreadPeers.create_all((0, 1, 2)):
        held = {f"w{place}": torch.full((2,), float(place)) for place in range(3)}
        if peers.rank == 1:
            held["w1"] = held["w1"].to_sparse()
        ranks.append(Rank(peers, [ReplicatedStateRecipe(StateTable(held).view())]))
    for outcome in checked(ranks):
        assert named(outcome.records) == {}
        failed = [each for each in outcome.records if "replay failed on rank 1" in str(each.reason)]
        assert {each.surface for each in failed} == {"w0", "w1", "w2"}
        assert {each.surface for each in outcome.records if each.peers == (0, 2)} == {"w0", "w1", "w2"}


class Signed(Planned):
    """A recipe whose signatures are read when all are done, which fails on the rank ``broken``."""

    broken: int | None = None

    def begin(self, target: int, *, is_source: bool) -> Any:
        replay: Any = super().begin(target, is_source=is_source)
        observe = replay.observe

        def later(seen: Observation) -> None:
            found = Observation(seen.variant)
            observe(found)
            pending: Any = PendingSignatures([torch.zeros(3)], algorithm="fold")
            if self.rank == self.broken:
                pending.folds = {torch.device("cpu"): torch.empty(1, device="meta")}
            seen.when_signed(pending, lambda _: seen.signatures.update(found.signatures))

        replay.observe = later
        return replay


@pytest.mark.parametrize("broken", [None, 1])
def test_signatures_that_cannot_be_read_are_no_evidence(broken: int | None):
    ranks = []
    for peers in ThreadPeers.create_all((0, 1, 2, 3)):
        recipes = [Signed(peers.rank), Signed(peers.rank, wrong_output(3), kind="output")]
        for recipe in recipes:
            recipe.broken = broken
        ranks.append(Rank(peers, recipes))
    for outcome in checked(ranks):
        # A rank that failed may compute together with the one that differs, which is then not to blame.
        assert set(named(outcome.records).values()) == ({(3,)} if broken is None else set())
        compared = {each.peers for each in outcome.records if each.verdict is not None}
        assert compared == {(0, 1, 2, 3) if broken is None else (0, 2, 3)}


def test_peers_that_are_not_the_whole_job_meet_before_each_replay():
    """Their replays may communicate; who is lost is then missed on SCOUT's own groups. And they do not know
    what other groups have found."""
    counts = {}
    for groups in [((0, 1, 2, 3),), ((0, 2), (1, 3))]:
        every = ThreadPeers.create_all(*groups)
        kinds = ("layer", "output", "embedding")
        ranks = [Rank(peers, [Planned(peers.rank, kind=kind) for kind in kinds]) for peers in every]
        checked(ranks)
        counts[len(groups)] = {rank.peers.exchanges for rank in ranks}
    assert counts == {1: {4}, 2: {4 + 3 + 1}}


def test_nothing_is_exchanged_when_nothing_is_due():
    (peers,) = ThreadPeers.create_all((0,))
    recipe = Planned(0)
    rotation = Rotation({"layer": 2}, {"layer": 10})
    replayer = Replayer([recipe], rotation, lambda *_: peers)
    for step in range(1, 10):
        replayer.begin(step)
        assert not replayer.is_due
        assert replayer.check(step) == Findings()
    assert (peers.exchanges, recipe.calls, rotation.rounds) == (0, [], 0)
    replayer.begin(10)
    assert replayer.is_due
    replayer.check(10)
    assert peers.exchanges > 0
    assert rotation.rounds == 1


def test_what_is_run_for_the_first_time_is_not_timed():
    """Of two targets that are the same work, only the first is cold."""
    ranks = job()
    assert [each.measured for each in checked(ranks)] == [[], [], []]
    for findings in on_threads([rank.peers for rank in ranks], lambda peers: ranks[peers.rank].step(2)):
        (each,) = findings.measured
        assert (each.layer, each.shape) == ("b", (1,))


def test_what_looks_slow_is_timed_again_and_the_shortest_time_counts():
    """Rank 1 is slow in its first run of a check only, rank 2 in every one."""
    ranks = job()
    for rank in ranks:
        recipe = rank.recipes[0]

        def timed(recipe: Planned = recipe, rank: int = rank.rank) -> float:
            is_first = recipe.call_names().count("observe") == 1
            return 9.0 if rank == 2 or (rank == 1 and is_first) else 1.0

        recipe.milliseconds = timed
        rank.replayer.doubted = lambda _, __, measured: {each.layer for each in measured}
    checked(ranks)
    found = on_threads([rank.peers for rank in ranks], lambda peers: ranks[peers.rank].step(2))
    assert [each.times["time/module"] for findings in found for each in findings.measured] == [1.0, 1.0, 9.0]
    for rank in ranks:
        assert rank.recipes[0].call_names().count("observe") == 1 + 1 + 4, "the first check is cold"


def test_a_check_can_be_abandoned():
    (rank,) = job(lambda *_: None, (0,))
    rank.replayer.begin(1)
    rank.replayer.abandon()
    assert not rank.replayer.is_due
    assert rank.recipes[0].call_names() == ["begin", "release"]


def test_a_missing_peer_ends_the_check_and_releases_everything():
    every = ThreadPeers.create_all((0, 1), timeout=0.3)
    rank = Rank(every[0], [Planned(0)])
    with pytest.raises(ChannelError):
        rank.step()
    assert rank.recipes[0].call_names()[-1] == "release"
    assert not rank.replayer.is_due
    assert rank.rotation.rounds == 1, "the next check has another source, as on every rank"


def test_a_channel_that_breaks_in_a_replay_is_not_taken_for_a_failure_of_the_replay():
    (rank,) = job(fails(0, "observe", ChannelError("the network is gone")), (0,))
    with pytest.raises(ChannelError, match="the network is gone"):
        rank.step()
    assert rank.recipes[0].call_names()[-1] == "release"


def test_an_update_inside_the_backward_pass_is_not_checked():
    ranks = job()
    by_peers = {rank.peers: rank for rank in ranks}

    def body(peers: ThreadPeers) -> Findings:
        rank, outcomes = by_peers[peers], []
        rank.replayer.begin(1)
        weight = torch.ones(2, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda _: outcomes.append(rank.replayer.check(1)))
        (weight * 2).sum().backward()
        return outcomes[0]

    for outcome in on_threads([rank.peers for rank in ranks], body):
        (record,) = outcome.records
        assert record.reason == "rank 0: the optimizer steps inside the backward pass"
    assert all(rank.recipes[0].call_names() == ["begin", "describe", "release"] for rank in ranks)
