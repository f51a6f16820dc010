"""Replay of FSDP2 and HSDP: layers on gathered parameters, state with one owner or with copies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.replay_results import Result
from tests.support.sharded_jobs import HAS_RESET, SHARDINGS, Failing, as_before_reset, train
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.replay import fsdp_state

REPLAY = range(1, 200)
"""Passes that are not training's own."""

RESET = pytest.param(True, marks=pytest.mark.skipif(not HAS_RESET, reason="FSDP's public reset is not in it"))
"""Replayed passes are forgotten by FSDP's public call; False: by what takes its place before PyTorch 2.13."""
SLOW = pytest.mark.slow


def as_expected(faults: FaultPlan, mesh: Mesh) -> tuple[str, tuple[int, ...], str]:
    (truth,) = faults.truth(mesh)
    return truth.scope.value, truth.ranks, truth.surface


def with_and_without(
    rank: int, shape: tuple[int, ...], sharding: str, has_reset: bool, run_dir: Path
) -> tuple[bool, Result]:
    if not has_reset:
        as_before_reset()
    alone = train(rank, shape, sharding, None)
    checked = train(rank, shape, sharding, run_dir)
    return alone.bits == checked.bits, checked


@pytest.mark.slow_cases("reset-shape7-plain")
@pytest.mark.long_cases("reset-shape0-plain")
@pytest.mark.parametrize(
    ("shape", "sharding"),
    [
        *(pytest.param((4,), name, marks=() if name == "plain" else SLOW) for name in SHARDINGS),
        ((3, 2), "plain"),
        pytest.param((2, 2), "bfloat16", marks=SLOW),
        pytest.param((4, 1), "grouped", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "has_reset",
    [
        pytest.param(RESET, id="reset"),
        pytest.param(False, id="no reset", marks=SLOW),  # passes that fail are tried without, below
    ],
)
def test_training_is_bitwise_the_same_and_everything_is_checked(
    shape: tuple[int, ...], sharding: str, has_reset: bool, tmp_path: Path
):
    ranks = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    for same, found in run_ranks(with_and_without, ranks, shape, sharding, has_reset, tmp_path, timeout=240):
        assert same
        assert found.failures == []
        assert found.incidents == []
        agreed = {record.surface for record in found.records if record.status == "agree"}
        assert {f"{part}/output" for part in ("tokens", "stack.0", "stack.1", "head")} <= agreed
        assert {f"{part}/parameters" for part in ("tokens", "stack.0", "stack.1", "head")} <= agreed
        assert {"stack.0/grad_input", "head/weight.grad", "stack.1.up/weight.grad"} <= agreed
        assert {"optimizer/param", "optimizer/reproduced"} <= agreed
        state = {"state/owned"} if len(shape) == 1 else {"state/parameters", "state/optimizer"}
        assert state <= agreed
        unchecked = {(record.surface, record.reason) for record in found.records if record.verdict is None}
        assert unchecked == set()
        assert found.certified == 12


@pytest.mark.slow_cases(
    "2-head/output-calls3-head/output",
    "2-stack.1.norm/grad_output-calls2-stack.1/grad_input",
    "2-stack.1/grad_input-calls1-stack.1/grad_input",
    "2-stack.1/output-calls0-stack.1/output",
)
@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [
        ("stack.1/output", REPLAY, "stack.1/output"),
        ("stack.1/grad_input", REPLAY, "stack.1/grad_input"),
        ("stack.1.norm/grad_output", REPLAY, "stack.1/grad_input"),  # and the gradients of the norm's weights
        ("head/output", REPLAY, "head/output"),
        (
            "stack.0.up/weight",
            range(1),
            "optimizer/update",
        ),  # the owner's real update, when its turn has come
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 2])
def test_a_wrong_number_under_fsdp_names_the_rank(
    rank: int, at: str, calls: range, surface: str, tmp_path: Path
):
    step = {"optimizer/update": 4}.get(surface, 2)
    # The owner of the slice is the source of its round: rank (step - 1) of 4.
    rank = (step - 1) % 4 if surface == "optimizer/update" else rank
    faults = FaultPlan().flip_bit(rank=rank, at=at, step=step, bit=2, calls=calls)
    inside = faults.showing(surface) if at == "stack.1.norm/grad_output" else faults
    assert as_expected(inside, Mesh.grid(shard=4)) == ("rank", (rank,), surface)
    found = run_ranks(train, 4, (4,), "plain", tmp_path, faults, 5, timeout=120)
    assert sum(each.fired for each in found) >= 1
    assert found[0].incidents == [("rank", (rank,), surface, step)], found[0].sentences


@pytest.mark.slow_cases("hsdp")
@pytest.mark.parametrize(
    ("shape", "group", "named"),
    [((4,), "default_pg", 2), ((3, 2), "mesh_dp_shard", 3)],
    ids=["fsdp2", "hsdp"],
)
def test_what_gathering_leaves_wrong_in_memory_names_the_rank(
    shape: tuple[int, ...], group: str, named: int, tmp_path: Path
):
    """Training gathers five times in a step, replay once with scratch data and once for the embedding; then
    comes the layer."""
    faults = FaultPlan().flip_bit(rank=named, at=f"all_gather@{group}", step=2, bit=20, calls=range(7, 400))
    found = run_ranks(train, math.prod(shape), shape, "plain", tmp_path, faults, 3, timeout=120)
    assert found[named].fired
    assert found[0].incidents == [("rank", (named,), "stack.1/parameters", 2)], found[0].sentences


@pytest.mark.parametrize("ranks", [4, 2])  # of two, too: nobody needs to vote on it
def test_a_shard_that_changes_between_updates_names_its_owner(ranks: int, tmp_path: Path):
    found = run_ranks(train, ranks, (ranks,), "plain", tmp_path, FaultPlan(), 5, 1, timeout=120)
    assert found[0].incidents == [("rank", (1,), "state/owned", 3)], found[0].sentences


@pytest.mark.slow_cases("stack.1/output-calls0-stack.1/output")
@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [
        ("stack.1/output", REPLAY, "stack.1/output"),
        ("stack.1.up/weight", range(1), "stack.1.up/weight"),
        pytest.param("stack.1.up/weight.exp_avg", range(1), "stack.1.up/weight.exp_avg", marks=SLOW),
        # A gradient shard before the update.
        pytest.param("stack.1.up/weight.grad", range(1), "stack.1.up/weight", marks=SLOW),
    ],
)
def test_a_wrong_number_under_hsdp_names_the_rank(at: str, calls: range, surface: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=calls)
    assert as_expected(faults, Mesh.grid(replica=3, shard=2)) == ("rank", (3,), surface)
    found = run_ranks(train, 6, (3, 2), "plain", tmp_path, faults, 3, timeout=120)
    assert found[3].fired
    first = found[0].incidents[0]
    assert first == ("rank", (3,), surface, 2), found[0].sentences
    assert {ranks for _, ranks, _, _ in found[0].incidents} == {(3,)}, found[0].sentences


@pytest.mark.long
def test_a_wrong_gradient_after_the_all_reduce_names_the_rank_that_holds_it(tmp_path: Path):
    """Training reduces three times in a step: two blocks and the rest; replay reduces once more."""
    at = "all_reduce@mesh_dp_replicate"
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=range(3, 400))
    found = run_ranks(train, 6, (3, 2), "plain", tmp_path, faults, 3, timeout=120)
    assert found[3].fired
    assert found[0].incidents == [("rank", (3,), "stack.1/grad_reduced", 2)], found[0].sentences


def test_two_replicas_of_shards_differ_as_a_pair(tmp_path: Path):
    """State is compared shard by shard, and of two copies nobody can say which is right."""
    faults = FaultPlan().flip_bit(rank=3, at="stack.1.up/weight", step=2, bit=20)
    assert as_expected(faults, Mesh.grid(replica=2, shard=2)) == ("peer_group", (1, 3), "stack.1.up/weight")
    found = run_ranks(train, 4, (2, 2), "plain", tmp_path, faults, 2, timeout=120)
    assert found[3].fired
    assert found[0].incidents == [("peer_group", (1, 3), "stack.1.up/weight", 2)], found[0].sentences


@pytest.mark.long_cases("output")
@pytest.mark.parametrize("at", ["output", pytest.param("grad_input", marks=SLOW)])
def test_what_two_replicas_of_shards_compute_names_the_rank(at: str, tmp_path: Path):
    """Gathered, the parameters are equal on all four ranks."""
    faults = FaultPlan().flip_bit(rank=3, at=f"stack.1/{at}", step=2, bit=20, calls=REPLAY)
    assert as_expected(faults, Mesh.grid(replica=2, shard=2)) == ("rank", (3,), f"stack.1/{at}")
    found = run_ranks(train, 4, (2, 2), "plain", tmp_path, faults, 3, timeout=120)
    assert found[3].fired
    assert found[0].incidents == [("rank", (3,), f"stack.1/{at}", 2)], found[0].sentences


FAILURES = tuple(
    Failing(ranks, within) for ranks in ((1,), (0, 1, 2, 3)) for within in ("entry", "forward", "backward")
)


def failing(rank: int, sharding: str, has_reset: bool, run_dir: Path) -> list[tuple[bool, Result]]:
    """For each failure whether training was the same, and what was found."""
    if not has_reset:
        as_before_reset()
    alone = train(rank, (4,), sharding, None, steps=4)
    checked = [
        train(rank, (4,), sharding, run_dir / str(place), steps=4, failing=each)
        for place, each in enumerate(FAILURES)
    ]
    return [(alone.bits == each.bits, each) for each in checked]


@pytest.mark.slow_cases("reset-plain")
@pytest.mark.long_cases("no reset-plain")
@pytest.mark.parametrize(
    "sharding",
    [
        "plain",
        *(pytest.param(each, marks=SLOW) for each in ("prefetched", "nested", "grouped", "checkpointed")),
    ],
)
@pytest.mark.parametrize("has_reset", [RESET, False], ids=["reset", "no reset"])
def test_a_replayed_pass_that_fails_under_fsdp_harms_nobody(sharding: str, has_reset: bool, tmp_path: Path):
    """No rank waits for the one that failed, and FSDP goes on as if it had never begun the pass."""
    for results in run_ranks(failing, 4, sharding, has_reset, tmp_path, timeout=180):
        for fault, (same, found) in zip(FAILURES, results, strict=True):
            assert same, fault
            assert (found.failures, found.incidents) == ([], [])
            surface = "stack.0/grad_input" if fault.within == "backward" else "stack.0/output"
            of_block = [each for each in found.records if each.surface == surface]
            failed = {each.peers for each in of_block if each.reason and "replay failed" in each.reason}
            assert failed == {fault.ranks}
            compared = {each.peers for each in of_block if each.status == "agree"}
            assert compared == ({(0, 2, 3)} if fault.ranks == (1,) else set())
            assert {each.status for each in found.records if each.surface == "stack.1/output"} == {"agree"}


def unknown_fsdp(rank: int, run_dir: Path) -> tuple[bool, Result]:
    as_before_reset()
    alone = train(rank, (3,), "plain", None, steps=3)
    fsdp_state._OF_GROUP += ("_of_another_release",)
    checked = train(rank, (3,), "plain", run_dir, steps=3)
    return alone.bits == checked.bits, checked


def test_without_what_a_reset_needs_layers_are_left_out_and_the_rest_is_compared(tmp_path: Path):
    for same, found in run_ranks(unknown_fsdp, 3, tmp_path, timeout=120):
        assert same
        assert (found.failures, found.incidents) == ([], [])
        reasons = {each.layer: str(each.reason) for each in found.records if each.verdict is None}
        assert reasons.keys() == {"tokens", "stack.0", "stack.1", "head"}
        assert all("has no FSDPParamGroup._of_another_release" in each for each in reasons.values())
        agreed = {each.surface for each in found.records if each.status == "agree"}
        assert {"optimizer/param", "optimizer/reproduced", "state/owned"} <= agreed
