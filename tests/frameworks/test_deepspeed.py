"""DeepSpeed as it is shipped, on Gloo ranks: what is checked, who is named, what training keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepspeed.utils import groups

from tests.support.deepspeed_jobs import Plan, Told, answering, attach_to_another_version, train
from tests.support.hangs import QUICK, STALL, incidents, wait_for_incident
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, losses_in, torchrun
from torchscout.faults.fault import Faults
from torchscout.integration.deepspeed import lacking
from torchscout.integration.resumption import Sweep
from torchscout.mesh import Mesh

REPLAYED = range(1, 30)
"""Passes that are not training's own."""
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
LLAMA = ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
slow = pytest.mark.slow


def scaled(stage: int, power: int, **more: Any) -> Plan:
    """Losses are scaled; gradients overflow in some steps, whose updates are skipped."""
    scaling = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}
    return Plan(stage, settings={"fp16": scaling}, **more)


HEALTHY = {
    "zero-2 bf16": Plan(2, bf16=True),
    "zero-3 bf16": Plan(3, bf16=True, zero=SOME_SMALL),
    "pipeline zero-1 bf16": Plan(1, "pipeline", bf16=True),
    "experts zero-2 bf16": Plan(2, "mixture", bf16=True),
    "autotp zero-1 bf16": Plan(1, "tensor", bf16=True),
    "streams by name": Plan(1, "streams"),
    "zero-2 fp16, skipped updates": scaled(2, 20),
}
MORE = {
    "zero-0": Plan(0),
    "zero-0 bf16": Plan(0, bf16=True),
    "zero-0 fp16, skipped updates": scaled(0, 26),
    "zero-1": Plan(1),
    "zero-1 bf16 optimizer": Plan(1, bf16=True, settings=FP32_SUMS),
    "zero-2": Plan(2),
    "zero-3": Plan(3, zero=SOME_SMALL),
    "zero-3, all gathered": Plan(3),
    "zero-3 hpZ": Plan(3, zero=WITHIN_PAIRS),
    "zero-3 fp16, skipped updates": scaled(3, 20, zero=SOME_SMALL),
    "zero-3, born in shards": Plan(3, "born_sharded", zero=SOME_SMALL),
    "pipeline zero-0": Plan(0, "pipeline"),
    "ulysses zero-1": Plan(1, "ulysses", bf16=True),
    "ulysses zero-3": Plan(3, "ulysses", zero=SOME_SMALL),
    "experts zero-0": Plan(0, "mixture"),
    "autotp zero-0": Plan(0, "tensor"),
    "autotp zero-2": Plan(2, "tensor"),
    "autotp zero-3 bf16": Plan(3, "tensor", bf16=True, zero=SOME_SMALL),
}


def each_of(plans: Mapping[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    tuples = {name: each if isinstance(each, tuple) else (each,) for name, each in plans.items()}
    return [pytest.param(*each, id=name, marks=marks) for name, each in tuples.items()]


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 4) as ranks:
        yield ranks


@pytest.mark.parametrize("plan", each_of(HEALTHY) + each_of(MORE, slow))
def test_training_is_bitwise_the_same_and_everything_is_checked(four: LiveRanks, plan: Plan, tmp_path: Path):
    alone = four.ask(plan, 400)
    checked = four.ask(replace(plan, run_dir=tmp_path), 400)
    for rank, (plain, told) in enumerate(zip(alone, checked, strict=True)):
        assert told.bits == plain.bits
        assert len(told.bits) == 6
        assert told.places == told.groups
        assert (told.failures, told.named) == ([], [])
        assert {name: why for name, why in told.unchecked.items() if "did not step" not in str(why)} == {}
        assert not told.unchecked or "fp16" in plan.settings
        parts = parts_of(plan, rank)
        assert {f"{part}/{what}" for part in parts for what in ("output", "parameters")} <= told.agreed
        assert {f"{parts[1]}/grad_input", "optimizer/param", "optimizer/reproduced"} <= told.agreed
        assert state_of(plan) <= told.agreed
        # A step is what ends an accumulation, and nothing else.
        assert (told.status["step"], told.status["replay"]["checks"]) == (6, 6)


def parts_of(plan: Plan, rank: int) -> tuple[str, ...]:
    """What is replayed on a rank."""
    stages = (("0", "1", "2"), ("3", "4", "5"))
    return {
        "pipeline": stages[rank // 2],
        "mixture": ("tokens", "stack.0.up", *EXPERTS, "head"),
        "tensor": LLAMA,
    }.get(plan.kind, ("tokens", "stack.0", "stack.1", "head"))


def state_of(plan: Plan) -> set[str]:
    """What has copies is compared; what has one owner must not change by itself."""
    kept = {0: {"state/parameters", "state/optimizer"}, 3: {"state/at_rest"}}
    return kept.get(plan.stage, {"state/parameters", "state/at_rest"})


def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    for told in four.ask(replace(scaled(2, 20), run_dir=tmp_path), 120):
        scales = [2.0**20, *told.scales.values()]
        skipped = {step for step in range(1, 7) if scales[step] < scales[step - 1]}
        assert skipped
        assert {each.step for each in told.records if each.surface == "optimizer/update"} == {
            *range(1, 7)
        } - skipped
        assert (told.status["step"], told.status["replay"]["checks"]) == (6, 6)


def test_uneven_routing_is_no_incident(four: LiveRanks, tmp_path: Path):
    plan = Plan(2, "uneven", bf16=True, observer=QUICK, run_dir=tmp_path)
    for told in four.ask(plan, 200):
        assert max(told.routed) > sum(told.routed) / 2
        assert (told.failures, told.named, told.unchecked) == ([], [], {})
        assert {f"{expert}/output" for expert in EXPERTS} <= told.agreed


def weight(at: str, rank: int, **more: Any) -> Faults:
    return Faults().flip_bit(rank=rank, at=f"{at}/weight", step=2, bit=2, **more)


def replayed(at: str, rank: int) -> Faults:
    return Faults().flip_bit(rank=rank, at=at, step=2, bit=2, calls=REPLAYED)


STAGE = "3.up"
"""Of the second stage: ranks 2 and 3."""
SPOILED = {
    "zero-2, a weight": (Plan(2, faults=weight("stack.0.up", 2)), (2,), "stack.0.up/weight"),
    "zero-2, a layer": (Plan(2, faults=replayed("stack.1/output", 2)), (2,), "stack.1/output"),
    "zero-3, a layer": (Plan(3, faults=replayed("stack.1/output", 1)), (1,), "stack.1/output"),
    "pipeline": (Plan(1, "pipeline", faults=weight(STAGE, 3)), (2, 3), f"{STAGE}/weight"),
    "experts": (Plan(2, "mixture", faults=weight(f"{EXPERTS[1]}.0", 3)), (1, 3), f"{EXPERTS[1]}.0/weight"),
    "autotp": (
        Plan(1, "tensor", faults=weight("model.layers.0.mlp.down_proj", 2)),
        (0, 2),
        "model.layers.0.mlp.down_proj/weight",
    ),
}
MORE_SPOILED = {
    "zero-0, a weight": (Plan(0, faults=weight("stack.0.up", 3)), (3,), "stack.0.up/weight"),
    "zero-0, a gradient": (Plan(0, faults=replayed("stack.1/grad_input", 0)), (0,), "stack.1/grad_input"),
    "zero-1, a weight": (Plan(1, faults=weight("stack.1.down", 1)), (1,), "stack.1.down/weight"),
    "zero-2, a gradient": (Plan(2, faults=replayed("stack.1/grad_input", 2)), (2,), "stack.1/grad_input"),
    "experts without zero": (
        Plan(0, "mixture", faults=weight(f"{EXPERTS[2]}.0", 0)),
        (0, 2),
        f"{EXPERTS[2]}.0/weight",
    ),
    "a dense part next to experts": (
        Plan(2, "mixture", faults=weight("stack.0.up", 1)),
        (1,),
        "stack.0.up/weight",
    ),
    "ulysses": (Plan(1, "ulysses", faults=weight("stack.0.qkv", 3)), (1, 3), "stack.0.qkv/weight"),
    "ulysses zero-3": (
        Plan(3, "ulysses", zero=SOME_SMALL, faults=replayed("stack.1/output", 1)),
        (1, 3),
        "stack.1/output",
    ),
}


@pytest.mark.parametrize(("plan", "ranks", "surface"), each_of(SPOILED) + each_of(MORE_SPOILED, slow))
def test_a_wrong_number_names_those_who_have_it(
    four: LiveRanks, plan: Plan, ranks: tuple[int, ...], surface: str, tmp_path: Path
):
    told = four.ask(replace(plan, steps=2, run_dir=tmp_path), 120)
    assert sum(each.fired for each in told) > 0
    (incident,) = told[0].incidents
    scope = "rank" if len(ranks) == 1 else "peer_group"
    assert told[0].named == [("sdc", scope, ranks, 2)], incident.sentence
    assert surface in {each.surface for each in incident.records}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("what", ["at_rest", "miscalculating"])
def test_what_one_rank_owns_is_watched_and_its_updates_recomputed(
    four: LiveRanks, what: str, stage: int, tmp_path: Path
):
    # Whoever owns a replayed update is the source of its round, and that is rank 2 in the third step.
    plan = replace(Plan(stage, bf16=True, steps=4, run_dir=tmp_path), **{what: 2})
    found = four.ask(plan, 120)
    assert found[0].named == [("sdc", "rank", (2,), 3)], found[0].incidents
    surface = {"at_rest": "state/at_rest", "miscalculating": "optimizer/update"}[what]
    assert found[0].incidents[0].records[0].surface == surface


def slow_layers(places: tuple[str, ...], rank: int) -> Faults:
    faults = Faults()
    for place in places:
        faults = faults.delay(rank=rank, at=f"{place}/forward", step=range(3, 9), seconds=0.25, calls=None)
    return faults


BOTH = slow_layers(("stack.0", "stack.1"), 1)
SLOW = {"zero-2": (Plan(2, faults=BOTH), (1,))}
MORE_SLOW = {
    "zero-0": (Plan(0, faults=BOTH), (1,)),
    "zero-1": (Plan(1, bf16=True, faults=BOTH), (1,)),
    "zero-3": (Plan(3, zero=SOME_SMALL, faults=BOTH), (1,)),
    "pipeline": (Plan(1, "pipeline", faults=slow_layers(("1", "2"), 1)), (0, 1)),
    "ulysses": (Plan(1, "ulysses", faults=BOTH), (1, 3)),
    "autotp": (Plan(1, "tensor", faults=slow_layers(("model.layers.0", "model.layers.1"), 1)), (1, 3)),
}
"""Of two that do the same work, both: one of them is late, and nothing says which is as it should be."""


@pytest.mark.parametrize(("plan", "ranks"), each_of(SLOW) + each_of(MORE_SLOW, slow))
def test_a_slow_rank_is_named(four: LiveRanks, plan: Plan, ranks: tuple[int, ...], tmp_path: Path):
    found = four.ask(replace(plan, run_dir=tmp_path), 120)
    assert found[1].fired > 4
    scope = "rank" if len(ranks) == 1 else "peer_group"
    assert {each[:3] for one in found for each in one.named} == {("straggler", scope, ranks)}, found[
        0
    ].incidents


LINKS = {
    "ulysses": ("ulysses", "all_to_all@mesh_sequence_parallel", "context"),
    "autotp": ("tensor", "all_reduce@mesh_tensor_parallel", "tensor"),
}


@slow
@pytest.mark.parametrize(("kind", "at", "axis"), each_of(LINKS))
def test_a_slow_link_names_its_process_group(kind: str, at: str, axis: str, tmp_path: Path):
    faults = Faults().slow_collective(ranks=[3], at=at, axis=axis, step=range(4, 7), seconds=0.25)
    mesh = Mesh.grid(replica=3, **{axis: 2}, hosts=[f"machine-{rank}" for rank in range(6)])
    plan = Plan(1, kind, steps=7, faults=faults, mesh=mesh, run_dir=tmp_path)
    found = run_ranks(train, 6, plan, timeout=300)
    assert found[3].fired
    assert [each[0] for each in found[0].named] == ["straggler"], found[0].incidents
    (truth,) = faults.truth(mesh)
    assert truth.ranks == (2, 3)
    assert truth.is_told_by(found[0].incidents[0]), found[0].incidents[0].sentence


KILLED = {"zero-3": Plan(3, bf16=True, zero=SOME_SMALL)}
MORE_KILLED = {
    "zero-0": Plan(0, bf16=True),
    "zero-0 fp16": scaled(0, 26),
    "zero-1": Plan(1),
    "zero-1 bf16 optimizer": Plan(1, bf16=True, settings=FP32_SUMS),
    "zero-2": Plan(2, bf16=True),
    "zero-2 fp16": scaled(2, 21),
    "zero-3 hpZ": Plan(3, bf16=True, zero=WITHIN_PAIRS),
    "zero-3 fp16": scaled(3, 21, zero=SOME_SMALL),
    "zero-3, born in shards": Plan(3, "born_sharded", bf16=True, zero=SOME_SMALL),
    "streams by name": Plan(1, "streams"),
    "pipeline zero-0": Plan(0, "pipeline"),
    "pipeline zero-1": Plan(1, "pipeline", bf16=True),
    "experts zero-0": Plan(0, "mixture"),
    "experts zero-2": Plan(2, "mixture", bf16=True),
    "ulysses zero-1": Plan(1, "ulysses", bf16=True),
    "ulysses zero-3": Plan(3, "ulysses", bf16=True),
    "autotp zero-0": Plan(0, "tensor"),
    "autotp zero-1": Plan(1, "tensor", bf16=True),
    "autotp zero-3": Plan(3, "tensor", bf16=True, zero=SOME_SMALL),
}


@pytest.mark.parametrize("plan", each_of(KILLED) + each_of(MORE_KILLED, slow))
def test_a_killed_job_goes_on_as_if_nothing_had_happened(four: LiveRanks, plan: Plan, tmp_path: Path):
    plan = replace(plan, steps=7)
    alone = four.ask(plan, 200)
    plan = replace(plan, directory=tmp_path / "checkpoints")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 4, replace(plan, killed=6, run_dir=tmp_path / "first"), timeout=200)
    again = four.ask(replace(plan, run_dir=tmp_path / "second"), 200)
    for whole, found in zip(alone, again, strict=True):
        goes_on(plan, whole, found)


def goes_on(plan: Plan, whole: Told, found: Told) -> None:
    # What is due after a step is captured when the next one begins, and a pipeline is killed before that.
    # A step that updates nothing certifies nothing.
    assert found.resumed is not None
    done = found.resumed.step
    assert done in ({4} if plan.kind == "pipeline" else {4, 5} if "fp16" in plan.settings else {5})
    assert (found.failures, found.named) == ([], [])
    if "fp16" in plan.settings:  # a scaler that begins anew would show
        assert whole.scales[done] != 2.0 ** plan.settings["fp16"]["initial_scale_power"]
    if plan.kind != "mixture":  # whose many parts have not all had their turn by then
        assert (found.resumed.swept, found.resumed.unswept) == (Sweep.CLEAN, None)
    assert found.bits == {step: whole.bits[step] for step in range(done + 1, 8)}


def test_what_comes_after_a_wrong_number_is_no_checkpoint(four: LiveRanks, tmp_path: Path):
    faults = Faults().flip_bit(rank=1, at="stack.1.down/weight", step=5, bit=2)
    plan = Plan(1, steps=7, directory=tmp_path / "checkpoints")
    for found in four.ask(replace(plan, faults=faults, run_dir=tmp_path / "first"), 120):
        assert ("sdc", "rank", (1,), 5) in found.named
        assert found.status["checkpoint"]["verified"] == 4
    alone = four.ask(replace(plan, directory=None), 120)
    for whole, found in zip(alone, four.ask(replace(plan, run_dir=tmp_path / "second"), 120), strict=True):
        assert found.resumed is not None
        assert found.resumed.step == 4
        assert found.bits == {step: whole.bits[step] for step in range(5, 8)}


LATE = {"zero-2": (Plan(2), "stack.1")}
MORE_LATE = {
    "zero-3": (Plan(3, zero=SOME_SMALL), "stack.1"),
    "pipeline": (Plan(1, "pipeline"), "4"),
    "autotp": (Plan(1, "tensor"), "model.layers.1"),
    "ulysses": (Plan(1, "ulysses"), "stack.1"),
    "experts": (Plan(2, "mixture"), "stack.1.up"),
}


@pytest.mark.parametrize(("plan", "layer"), each_of(LATE) + each_of(MORE_LATE, slow))
def test_a_late_rank_is_named(four: LiveRanks, plan: Plan, layer: str, tmp_path: Path):
    faults = Faults().stall(rank=2, at=f"{layer}/forward", step=4, seconds=STALL)
    found = four.ask(replace(plan, replay=None, observer=QUICK, faults=faults, run_dir=tmp_path), 120)
    assert [each.fired for each in found] == [0, 0, 1, 0]
    assert [each[:3] for each in found[0].named] == [("hang", "rank", (2,))], found[0].incidents


@slow
def test_a_rank_with_another_collective_is_named(tmp_path: Path):
    at = {"at": "all_reduce@undefined", "axis": "replica"}
    faults = Faults().change_collective(rank=1, step=4, what="dtype", **at)
    plan = Plan(0, replay=None, observer=QUICK, faults=faults, run_dir=tmp_path)
    with suppress(RankError):  # Gloo may abort a process over it
        run_ranks(train, 4, plan, timeout=40)
    wait_for_incident(tmp_path)
    assert {each.ranks for each in incidents(tmp_path)} == {(1,)}, incidents(tmp_path)


OFFLOADED = Plan(
    2,
    zero={"offload_optimizer": {"device": "cpu"}},
    settings={"zero_force_ds_cpu_optimizer": False},
)
REFUSED = {"offloading": (OFFLOADED, "offloading")}
MORE_REFUSED = {"AutoEP": (Plan(0, "autoep"), "AutoEP")}


@pytest.mark.parametrize(("plan", "what"), each_of(REFUSED) + each_of(MORE_REFUSED, slow))
def test_what_is_not_supported_is_said_in_a_sentence_and_training_goes_on(
    four: LiveRanks, plan: Plan, what: str, tmp_path: Path
):
    plan = replace(plan, steps=3)
    alone, attached = four.ask(plan, 120), four.ask(replace(plan, run_dir=tmp_path), 120)
    for plain, found in zip(alone, attached, strict=True):
        assert found.bits == plain.bits
        assert (found.failures, found.records) == ([], [])
        assert found.status["replay"] == {"off": f"replay does not support DeepSpeed's {what}"}


def test_with_another_series_of_deepspeed_there_is_no_replay(four: LiveRanks, tmp_path: Path):
    told = four.ask(partial(attach_to_another_version, run_dir=tmp_path), 60)
    assert set(told) == {"deepspeed 0.18.9 is not known here, 0.19 is"}


def test_what_a_release_lacks_is_said():
    assert lacking([(groups, "_get_model_parallel_world_size")]) is None
    told = lacking([(groups, "_get_expert_parallel_group_dict"), (groups, "_gone")])
    assert told is not None
    assert "has no deepspeed.utils.groups._gone, which torchscout needs; 0.19.8 has it" in told


@slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "deepspeed_zero.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for first, last in ((1, 10), (11, 15)):
        told = losses_in(torchrun(3, [script, "--steps", last], tmp_path, DS_ACCELERATOR="cpu"))
        assert [*told] == [*range(first, last + 1)]
        losses |= told
    assert losses[15] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents.jsonl")]
