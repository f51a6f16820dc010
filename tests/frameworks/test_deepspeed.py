"""DeepSpeed as it is shipped, on Gloo ranks: what is checked, who is named, what training keeps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.utils import groups

from tests.support.deepspeed_jobs import Plan, Told, train, work_of
from tests.support.hangs import QUICK, STALL, incidents, wait_for_incident
from tests.support.ranks import RankError, run_ranks
from torchscout.faults.fault import Faults
from torchscout.integration.deepspeed import DeepSpeedAdapter
from torchscout.integration.resumption import Sweep
from torchscout.mesh import Mesh, Role

REPLAY = range(1, 9)
"""Passes that are not training's own."""
PARTS = ("tokens", "stack.0", "stack.1", "head")
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With it, DeepSpeed takes its optimizer for bfloat16."""
SOME_SMALL = {"stage3_param_persistence_threshold": 20}
"""Norms and biases are small enough to stay gathered."""
WITHIN_PAIRS = {**SOME_SMALL, "zero_hpz_partition_size": 2}
"""Two ranks hold all parameters between them, besides."""
EXPERTS = tuple(
    f"stack.{layer}.routed.moe.deepspeed_moe.experts.deepspeed_experts.{each}"
    for layer in (0, 1)
    for each in (0, 1)
)
slow = pytest.mark.slow


def with_and_without(rank: int, plan: Plan, run_dir: Path) -> tuple[bool, Told]:
    alone = train(rank, plan)
    checked = train(rank, replace(plan, run_dir=run_dir))
    return alone.bits == checked.bits, checked


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(0), id="zero-0", marks=slow),
        pytest.param(Plan(0, bf16=True), id="zero-0 bf16", marks=slow),
        pytest.param(Plan(1), id="zero-1", marks=slow),
        pytest.param(Plan(1, bf16=True, settings=FP32_SUMS), id="zero-1 bf16 optimizer", marks=slow),
        pytest.param(Plan(2), id="zero-2", marks=slow),
        pytest.param(Plan(2, bf16=True), id="zero-2 bf16"),
        pytest.param(Plan(3, zero=SOME_SMALL), id="zero-3", marks=slow),
        pytest.param(Plan(3, bf16=True, zero=SOME_SMALL), id="zero-3 bf16"),
        pytest.param(Plan(3), id="zero-3, all gathered", marks=slow),
        pytest.param(Plan(3, zero=WITHIN_PAIRS), id="zero-3 hpZ", marks=slow),
        pytest.param(Plan(1, "ulysses", bf16=True), id="ulysses zero-1", marks=slow),
        pytest.param(Plan(3, "ulysses", zero=SOME_SMALL), id="ulysses zero-3", marks=slow),
        pytest.param(Plan(0, "mixture"), id="experts zero-0", marks=slow),
        pytest.param(Plan(2, "mixture", bf16=True), id="experts zero-2", marks=slow),
    ],
)
def test_training_is_bitwise_the_same_and_everything_is_checked(plan: Plan, tmp_path: Path):
    for same, found in run_ranks(with_and_without, 4, plan, tmp_path, timeout=400):
        assert same
        assert len(found.bits) == 6
        assert (found.failures, found.named, found.unchecked) == ([], [], {})
        layers = ("stack.0", "stack.1") if plan.kind != "mixture" else ("stack.0.up", *EXPERTS)
        parts = ("tokens", *layers, "head")
        assert {f"{part}/{what}" for part in parts for what in ("output", "parameters")} <= found.agreed
        assert {f"{layers[0]}/grad_input", "head/weight.grad", "stack.0.up/weight.grad"} <= found.agreed
        assert {"optimizer/param", "optimizer/reproduced"} <= found.agreed
        state = {0: {"state/parameters", "state/optimizer"}, 3: {"state/at_rest"}}
        assert state.get(plan.stage, {"state/parameters", "state/at_rest"}) <= found.agreed
        # A step is what ends an accumulation, and nothing else.
        assert (found.status["step"], found.status["replay"]["checks"]) == (6, 6)


@pytest.mark.parametrize("plan", [Plan(0, "pipeline"), Plan(1, "pipeline", bf16=True)], ids=["0", "1"])
@slow
def test_a_pipeline_is_bitwise_the_same_and_every_stage_is_checked(plan: Plan, tmp_path: Path):
    for rank, (same, found) in enumerate(run_ranks(with_and_without, 4, plan, tmp_path, timeout=400)):
        assert same
        assert (found.failures, found.named, found.unchecked) == ([], [], {})
        parts = ("0", "1", "2") if rank < 2 else ("3", "4", "5")
        assert {f"{part}/{what}" for part in parts for what in ("output", "parameters")} <= found.agreed
        assert {"optimizer/reproduced", "state/parameters"} <= found.agreed
        assert ("state/at_rest" if plan.stage else "state/optimizer") in found.agreed
        assert (found.status["step"], found.status["replay"]["checks"]) == (6, 6)


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=slow) for kind in ("pipeline", "mixture", "ulysses"))]
)
def test_ranks_are_where_the_framework_has_them(kind: str):
    for ours, theirs in run_ranks(_groups, 4, Plan(kind=kind), timeout=120):
        assert ours == theirs
        assert len(ours["replica"]) == (2 if kind in ("pipeline", "ulysses") else 4)


def _groups(rank: int, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = work_of(plan, rank).engine
    mesh = DeepSpeedAdapter(engine, None).mesh(["here"] * 4)
    theirs = {"replica": engine.seq_data_parallel_group}
    if plan.kind == "pipeline":
        theirs = {
            "replica": engine.grid.get_data_parallel_group(),
            "pipeline": engine.grid.get_pipe_parallel_group(),
        }
    if plan.kind == "ulysses":
        theirs = {
            "replica": groups._get_data_parallel_group(),
            "context": groups._get_sequence_parallel_group(),
        }
    found = {axis: tuple(sorted(dist.get_process_group_ranks(group))) for axis, group in theirs.items()}
    ours = {axis: mesh.ranks_along(axis, rank, Role.DENSE) for axis in theirs}
    if plan.kind == "mixture":
        found |= {
            "expert": tuple(groups._get_expert_parallel_group_ranks("ep_size_2")),
            "holders": tuple(groups._get_expert_data_parallel_group_ranks("ep_size_2")),
        }
        ours |= {
            "expert": mesh.ranks_along("expert", rank, Role.EXPERT),
            "holders": mesh.ranks_along("replica", rank, Role.EXPERT),
        }
    return ours, found


@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [
        pytest.param("stack.1/output", REPLAY, "stack.1/output", marks=slow),
        pytest.param("stack.1/grad_input", REPLAY, "stack.1/grad_input", marks=slow),
        ("stack.0.up/weight", range(1), "stack.0.up/weight"),
    ],
)
def test_a_wrong_number_names_the_rank(at: str, calls: range, surface: str, tmp_path: Path):
    faults = Faults().flip_bit(rank=2, at=at, step=2, bit=2, calls=calls)
    found = run_ranks(train, 4, Plan(2, steps=3, faults=faults, run_dir=tmp_path), timeout=120)
    assert found[2].fired >= 1
    assert found[0].named[:1] == [("sdc", "rank", (2,), 2)], found[0].incidents
    (truth,) = faults.truth(Mesh.grid(replica=4))
    assert truth.is_told_by(found[0].incidents[0]), found[0].incidents[0].sentence
    assert found[0].incidents[0].records[0].surface == surface


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("what", ["at_rest", "miscalculating"])
def test_what_one_rank_owns_is_watched_and_its_updates_recomputed(what: str, stage: int, tmp_path: Path):
    # Whoever owns a replayed update is the source of its round, and that is rank 2 in the third step.
    plan = replace(Plan(stage, bf16=True, steps=4, run_dir=tmp_path), **{what: 2})
    found = run_ranks(train, 4, plan, timeout=120)
    assert found[0].named == [("sdc", "rank", (2,), 3)], found[0].incidents
    surface = {"at_rest": "state/at_rest", "miscalculating": "optimizer/update"}[what]
    assert found[0].incidents[0].records[0].surface == surface


def test_a_slow_rank_is_named(tmp_path: Path):
    faults = Faults()
    for layer in (0, 1):
        at = f"stack.{layer}/forward"
        faults = faults.delay(rank=1, at=at, step=range(4, 8), seconds=0.25, calls=None)
    found = run_ranks(train, 4, Plan(2, steps=6, faults=faults, run_dir=tmp_path), timeout=120)
    assert found[1].fired
    assert [each[:3] for each in found[0].named] == [("straggler", "rank", (1,))], found[0].incidents


@slow
def test_a_slow_exchange_of_sequences_names_its_group(tmp_path: Path):
    at = {"at": "all_to_all@mesh_sequence_parallel", "axis": "context"}
    faults = Faults().slow_collective(ranks=[3], step=range(4, 7), seconds=0.25, **at)
    mesh = Mesh.grid(replica=3, context=2, hosts=[f"machine-{rank}" for rank in range(6)])
    plan = Plan(1, "ulysses", steps=7, faults=faults, mesh=mesh, run_dir=tmp_path)
    found = run_ranks(train, 6, plan, timeout=300)
    assert found[3].fired
    assert [each[0] for each in found[0].named] == ["straggler"], found[0].incidents
    (truth,) = faults.truth(mesh)
    assert truth.ranks == (2, 3)
    assert truth.is_told_by(found[0].incidents[0]), found[0].incidents[0].sentence


@slow
def test_an_expert_that_computes_wrong_is_told_by_its_holders(tmp_path: Path):
    at = f"{EXPERTS[0]}/output"
    faults = (
        Faults().flip_bit(rank=0, at=at, step=range(1, 7), bit=2, calls=REPLAY).showing(at, role="expert")
    )
    found = run_ranks(train, 4, Plan(2, "mixture", faults=faults, run_dir=tmp_path), timeout=300)
    assert found[0].fired >= 1
    assert {each[:3] for each in found[0].named} == {("sdc", "peer_group", (0, 2))}, found[0].incidents


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(0, bf16=True), id="zero-0", marks=slow),
        pytest.param(Plan(1), id="zero-1", marks=slow),
        pytest.param(Plan(1, bf16=True, settings=FP32_SUMS), id="zero-1 bf16 optimizer", marks=slow),
        pytest.param(Plan(2, bf16=True), id="zero-2", marks=slow),
        pytest.param(Plan(3, bf16=True, zero=SOME_SMALL), id="zero-3"),
        pytest.param(Plan(3, bf16=True, zero=WITHIN_PAIRS), id="zero-3 hpZ", marks=slow),
        pytest.param(Plan(0, "pipeline"), id="pipeline zero-0", marks=slow),
        pytest.param(Plan(1, "pipeline", bf16=True), id="pipeline zero-1", marks=slow),
        pytest.param(Plan(0, "mixture"), id="experts zero-0", marks=slow),
        pytest.param(Plan(2, "mixture", bf16=True), id="experts zero-2", marks=slow),
        pytest.param(Plan(1, "ulysses", bf16=True), id="ulysses zero-1", marks=slow),
        pytest.param(Plan(3, "ulysses", bf16=True), id="ulysses zero-3", marks=slow),
    ],
)
def test_a_killed_job_goes_on_as_if_nothing_had_happened(plan: Plan, tmp_path: Path):
    plan = replace(plan, steps=7)
    alone = run_ranks(train, 4, plan, timeout=200)
    plan = replace(plan, directory=tmp_path / "checkpoints")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 4, replace(plan, killed=6, run_dir=tmp_path / "first"), timeout=200)
    again = run_ranks(train, 4, replace(plan, run_dir=tmp_path / "second"), timeout=200)
    # What is due after a step is captured when the next one begins, and a pipeline is killed before that.
    done = 4 if plan.kind == "pipeline" else 5
    for whole, found in zip(alone, again, strict=True):
        assert found.resumed is not None
        assert (found.resumed.step, found.failures, found.named) == (done, [], [])
        if plan.kind != "mixture":  # whose many parts have not all had their turn by then
            assert (found.resumed.swept, found.resumed.unswept) == (Sweep.CLEAN, None)
        assert found.bits == {step: whole.bits[step] for step in range(done + 1, 8)}


def test_what_comes_after_a_wrong_number_is_no_checkpoint(tmp_path: Path):
    faults = Faults().flip_bit(rank=1, at="stack.1.down/weight", step=5, bit=2)
    plan = Plan(1, steps=7, faults=faults, run_dir=tmp_path / "run", directory=tmp_path / "checkpoints")
    for found in run_ranks(train, 4, plan, timeout=120):
        assert ("sdc", "rank", (1,), 5) in found.named
        assert found.status["checkpoint"]["verified"] == 4


def test_a_late_rank_is_named(tmp_path: Path):
    faults = Faults().stall(rank=2, at="stack.1/forward", step=4, seconds=STALL)
    plan = Plan(2, replay=None, observer=QUICK, faults=faults, run_dir=tmp_path)
    found = run_ranks(train, 4, plan, timeout=120)
    assert [each.fired for each in found] == [0, 0, 1, 0]
    assert [each[:3] for each in found[0].named] == [("hang", "rank", (2,))], found[0].incidents
    (truth,) = faults.truth(Mesh.grid(replica=4))
    assert truth.is_told_by(found[0].incidents[0]), found[0].incidents[0].sentence


def test_a_rank_with_another_collective_is_named(tmp_path: Path):
    at = {"at": "all_reduce@undefined", "axis": "replica"}
    faults = Faults().change_collective(rank=1, step=4, what="dtype", **at)
    plan = Plan(0, replay=None, observer=QUICK, faults=faults, run_dir=tmp_path)
    with suppress(RankError):  # Gloo may abort a process over it
        run_ranks(train, 4, plan, timeout=40)
    wait_for_incident(tmp_path)
    assert {each.ranks for each in incidents(tmp_path)} == {(1,)}, incidents(tmp_path)


def test_what_is_not_supported_is_said_in_a_sentence_and_training_goes_on(tmp_path: Path):
    offloading = {"offload_optimizer": {"device": "cpu"}}
    plan = Plan(2, zero=offloading, settings={"zero_force_ds_cpu_optimizer": False}, steps=3)
    for same, found in run_ranks(with_and_without, 4, plan, tmp_path, timeout=120):
        assert same
        assert (found.failures, found.records) == ([], [])
        assert found.status["replay"] == {"off": "replay does not support DeepSpeed's offloading"}
