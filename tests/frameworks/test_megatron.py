"""The real Megatron-Core: meshes, replay without interference, faults named, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hangs import FAULTY_STEP, QUICK, STALL, incidents, wait_for_incident
from tests.support.megatron_jobs import Told, Trial, answering, train
from tests.support.megatron_layouts import (
    EXPERTS,
    FSDP,
    GATHERED,
    HEALTHY,
    LARGE,
    LAYER,
    MORE,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    SCALED,
    SHARDED,
    TENSOR,
    VIRTUAL,
)
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, losses_in, torchrun
from torchscout.config import ReplayConfig
from torchscout.faults.fault import Faults

ALL = None
REPLAYED = range(1, 30)


def each_of(trials: dict[str, tuple[Trial, str]], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(*each, id=name, marks=marks) for name, each in trials.items()]


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 8) as ranks:
        yield ranks


@pytest.mark.parametrize(("trial", "layers"), each_of(HEALTHY) + each_of(MORE, pytest.mark.slow))
def test_training_is_bitwise_the_same_with_a_check_at_every_step(
    four: LiveRanks, trial: Trial, layers: str, tmp_path: Path
):
    is_healthy(four, trial, layers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "layers"), each_of(LARGE))
def test_training_is_the_same_where_parallelisms_meet(
    eight: LiveRanks, trial: Trial, layers: str, tmp_path: Path
):
    is_healthy(eight, trial, layers, tmp_path)


def is_healthy(ranks: LiveRanks, trial: Trial, layers: str, run_dir: Path) -> None:
    alone = ranks.ask((trial, None), 200)
    checked = ranks.ask((trial, run_dir), 200)
    for plain, told in zip(alone, checked, strict=True):
        assert ([each.sentence for each in told.incidents], told.failures) == ([], [])
        assert told.bits == plain.bits
        assert told.agreed >= {f"{each}/output" for each in LAYER.get(layers, ())}
        assert told.agreed >= {f"{each}/parameters" for each in LAYER.get(layers, ())}
        assert told.agreed >= {"optimizer/reproduced", "optimizer/update"}
        assert ("state/parameters" in told.agreed) is not trial.fsdp
        assert ("state/at_rest" in told.agreed) is trial.sharded
        assert ("all_to_all/captured.received" in told.agreed) is (
            layers == "parts" and trial.dispatcher == "alltoall"
        )
        assert told.places == {name: told.groups[name] for name in told.places}
        assert {name: why for name, why in told.unchecked.items() if not _may_be(name, str(why))} == {}


def _may_be(name: str, why: str) -> bool:
    """What a healthy run may leave unchecked: skipped updates, an embedding that the output layer is given,
    experts that nobody asked."""
    return "did not step" in why or name == "output_layer/weight.grad" or "experts" in name


def test_shards_are_found_after_steps_without_a_check_too(four: LiveRanks, tmp_path: Path):
    for told in four.ask((replace(FSDP, steps=4, replay=ReplayConfig(interval=2)), tmp_path), 120):
        assert told.unchecked == {}
        assert told.agreed >= {f"{each}/output" for each in LAYER["layers"]}


def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    for told in four.ask((SCALED, tmp_path), 120):
        assert told.scales == [2.0**18, 2.0**17, 2.0**17, 2.0**17, 2.0**18, 2.0**18]
        assert (told.status["step"], told.status["replay"]["checks"]) == (6, 6)
        updates = {each.step for each in told.records if each.surface == "optimizer/update"}
        assert updates == {3, 4, 5, 6}


def output_of(layer: str, rank: int) -> Faults:
    return Faults().flip_bit(rank=rank, at=f"{layer}/output", step=2, bit=20, calls=REPLAYED)


def weight_of(layer: str, rank: int) -> Faults:
    return Faults().flip_bit(rank=rank, at=f"{layer}.linear_fc1/weight", step=2, bit=20)


SPOILED = {
    "a layer": (replace(REPLICAS, faults=output_of("decoder.layers.1", 2)), (2,), "decoder.layers.1/output"),
    "a weight": (
        replace(REPLICAS, faults=weight_of("decoder.layers.0.mlp", 1)),
        (1,),
        "decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "an expert of two": (
        replace(EXPERTS, faults=weight_of("decoder.layers.0.mlp.experts.local_experts.1", 3)),
        (1, 3),
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1/weight",
    ),
    "a stage of two": (
        replace(PIPELINE, faults=weight_of("decoder.layers.0.mlp", 2)),
        (2, 3),
        "decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "a stage's first chunk": (
        replace(VIRTUAL, faults=weight_of("decoder.layers.0.mlp", 1)),
        (0, 1),
        "0.module.decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "a tensor's half, of sequences": (
        replace(TENSOR, sequence=True, faults=output_of("decoder.layers.1", 3)),
        (1, 3),
        "decoder.layers.1/output",
    ),
    "a half of the context": (
        replace(Trial(context=2), faults=output_of("decoder.layers.1", 2)),
        (0, 2),
        "decoder.layers.1/output",
    ),
    "a layer in shards": (
        replace(FSDP, faults=output_of("module.decoder.layers.1", 2)),
        (2,),
        "decoder.layers.1/output",
    ),
}


@pytest.mark.parametrize(("trial", "ranks", "surface"), [pytest.param(*v, id=k) for k, v in SPOILED.items()])
def test_wrong_numbers_name_those_who_have_them(
    four: LiveRanks, trial: Trial, ranks: tuple[int, ...], surface: str, tmp_path: Path
):
    told = four.ask((replace(trial, steps=2), tmp_path), 120)
    assert sum(each.fired for each in told) > 0
    (incident,) = told[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", ranks, 2)
    assert surface in {each.surface for each in incident.records}


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(SHARDED, id="optimizer shards"),
        pytest.param(FSDP, id="parameter shards", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_in_what_one_rank_alone_holds_names_that_rank(
    four: LiveRanks, trial: Trial, tmp_path: Path
):
    told = four.ask((replace(trial, steps=4, spoiled=(1, 2)), tmp_path), 120)
    (incident,) = told[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/at_rest"}


SLOW_LAYERS = {
    "replicas": (REPLICAS, (2,)),
}
MORE_SLOW_LAYERS = {
    "tensor and sequence": (Trial(tensor=2, sequence=True), (0, 2)),
    "pipeline": (replace(PIPELINE, layers=4), (2, 3)),
    "context": (Trial(context=2), (0, 2)),
    "optimizer shards": (SHARDED, (2,)),
    "parameter shards": (FSDP, (2,)),
}
"""Of two that do the same work, both: one of them is late, and nothing says which is as it should be."""


@pytest.mark.parametrize(
    ("trial", "ranks"), each_of(SLOW_LAYERS) + each_of(MORE_SLOW_LAYERS, pytest.mark.slow)
)
def test_a_slow_layer_names_its_rank(four: LiveRanks, trial: Trial, ranks: tuple[int, ...], tmp_path: Path):
    faults = Faults()
    for layer in (0, 1):
        place = f"{'module.' * trial.fsdp}decoder.layers.{layer}/forward"
        faults = faults.delay(rank=2, at=place, step=range(3, 9), seconds=0.25, calls=ALL)
    told = four.ask((replace(trial, microbatches=max(1, trial.pipeline), faults=faults), tmp_path), 120)
    assert told[2].fired > 4
    (incident,) = {each.ranks: each for one in told for each in one.incidents}.values()
    assert (incident.manifestation.value, incident.ranks) == ("straggler", ranks)
    assert incident.scope.value == ("rank" if len(ranks) == 1 else "peer_group")


@pytest.mark.slow
def test_a_slow_layer_names_its_rank_among_those_of_the_same_part(tmp_path: Path):
    place = "decoder.layers.0/forward"
    faults = Faults().delay(rank=3, at=place, step=range(3, 9), seconds=0.25, calls=ALL)
    trial = Trial(tensor=2, layers=1, microbatches=1, faults=faults)
    told = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert told[3].fired > 2
    (incident,) = told[1].incidents
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("straggler", "rank", (3,))


@pytest.mark.slow
def test_a_slow_link_names_its_process_group(tmp_path: Path):
    place = "all_reduce@TENSOR_MODEL_PARALLEL_GROUP"
    faults = Faults().slow_collective(ranks=(2, 3), at=place, axis="tensor", step=range(3, 9), seconds=0.25)
    trial = Trial(tensor=2, layers=1, microbatches=1, faults=faults)
    told = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert told[3].fired > 4
    (incident,) = told[0].incidents
    assert (incident.manifestation.value, incident.ranks) == ("straggler", (2, 3)), incident.sentence


NO_REPLAY = replace(FSDP, experts=4, expert=2)
"""Not supported."""


MORE_LATE = {
    "pipeline": (replace(PIPELINE, replay=None),),
    "virtual pipeline": (replace(VIRTUAL, replay=None),),
    "tensor and sequence": (Trial(tensor=2, sequence=True, replay=None),),
    "context": (Trial(context=2, replay=None),),
    "experts": (replace(EXPERTS, replay=None),),
    "optimizer shards": (replace(SHARDED, replay=None),),
    "parameter shards": (replace(FSDP, replay=None),),
}


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(replace(REPLICAS, replay=None), id="replicas"),
        *each_of(MORE_LATE, pytest.mark.slow),
        pytest.param(NO_REPLAY, id="no replay", marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_is_named(four: LiveRanks, trial: Trial, tmp_path: Path):
    faults = Faults().stall(rank=2, at="step", step=FAULTY_STEP, seconds=STALL)
    told = four.ask((replace(trial, observer=QUICK, faults=faults), tmp_path), 120)
    assert [each.fired for each in told] == [0, 0, 1, 0]
    (incident,) = told[0].incidents
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("hang", "rank", (2,))


@pytest.mark.slow
def test_a_rank_that_does_something_else_is_named(tmp_path: Path):
    place = "all_reduce@DATA_PARALLEL_GROUP_WITH_CP"
    faults = Faults().change_collective(rank=1, at=place, axis="replica", step=FAULTY_STEP, what="dtype")
    trial = Trial(observer=QUICK, replay=None, faults=faults)
    with suppress(RankError):  # Gloo may abort a process over it
        run_ranks(train, 4, trial, tmp_path, timeout=120)
    wait_for_incident(tmp_path)
    assert {incident.ranks for incident in incidents(tmp_path)} == {(1,)}


KEPT = {
    "experts, optimizer shards, bfloat16": Trial(experts=4, expert=2, sharded=True, dtype="bfloat16"),
}
ALSO_KEPT = {
    "a loss scale": SCALED,
    "tensor": Trial(tensor=2, sequence=True),
    "pipeline": PIPELINE,
    "replicas": REPLICAS,
    "recomputed": RECOMPUTED,
    "parameter shards": FSDP,
    "parameter shards, bfloat16": replace(FSDP, dtype="bfloat16"),
    "parameter shards, tensor": replace(FSDP, tensor=2),
    "virtual pipeline": VIRTUAL,
    "context": Trial(context=2),
    "experts, gathered tokens": GATHERED,
    "optimizer shards, overlapping": Trial(sharded=True, overlap=True),
    "bfloat16": Trial(dtype="bfloat16"),
    "experts": EXPERTS,
}


@pytest.mark.parametrize(
    "trial",
    [
        *(pytest.param(each, id=name) for name, each in KEPT.items()),
        *(pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in ALSO_KEPT.items()),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_bitwise_as_if_nothing_had_been(
    four: LiveRanks, trial: Trial, tmp_path: Path
):
    through = four.ask((trial, None), 120)
    kept = replace(trial, directory=tmp_path / "kept")
    four.ask((replace(kept, steps=4), tmp_path / "first"), 120)
    again = four.ask((kept, tmp_path / "second"), 120)
    for plain, told in zip(through, again, strict=True):
        goes_on(plain, told)


def goes_on(plain: Told, told: Told) -> None:
    assert told.resumed is not None
    assert told.resumed.step == 4
    assert told.failures == []
    assert told.bits == {step: plain.bits[step] for step in (5, 6)}


KILLED = {"pipeline": PIPELINE, "virtual pipeline": VIRTUAL, "experts": EXPERTS, "parameter shards": FSDP}


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial(tensor=2, sharded=True), id="tensor, optimizer shards"),
        *(pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in KILLED.items()),
    ],
)
def test_a_killed_job_goes_on_bitwise(trial: Trial, tmp_path: Path):
    through = run_ranks(train, 4, trial, None, timeout=200)
    kept = replace(trial, directory=tmp_path / "kept")
    with pytest.raises(RankError):
        run_ranks(train, 4, replace(kept, killed=5), tmp_path / "first", timeout=200)
    for plain, told in zip(through, run_ranks(train, 4, kept, tmp_path / "second", timeout=200), strict=True):
        goes_on(plain, told)


def test_no_checkpoint_after_wrong_numbers_is_gone_back_to(four: LiveRanks, tmp_path: Path):
    kept = replace(REPLICAS, directory=tmp_path / "kept", replay=ReplayConfig(interval=1))
    faults = Faults().flip_bit(rank=1, at="decoder.layers.0.mlp.linear_fc1/weight", step=4, bit=20)
    first = four.ask((replace(kept, faults=faults), tmp_path / "first"), 120)
    assert all(each.status["checkpoint"]["poisoned"] for each in first)
    through = four.ask((REPLICAS, None), 120)
    for plain, told in zip(through, four.ask((kept, tmp_path / "second"), 120), strict=True):
        assert told.resumed is not None
        assert told.resumed.step < 4
        assert told.bits == {step: bits for step, bits in plain.bits.items() if step > told.resumed.step}


REFUSED = {
    "instances": (
        replace(SHARDED, instances=2),
        "several instances of Megatron's distributed optimizer are not supported",
    ),
    "experts in shards": (NO_REPLAY, "Megatron-FSDP is not supported with experts"),
    "no peers": (
        Trial(pipeline=4, virtual=2, layers=8, microbatches=4),
        "no other rank does the same work",
    ),
}


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        pytest.param(*each, id=name, marks=() if name == "instances" else pytest.mark.slow)
        for name, each in REFUSED.items()
    ],
)
def test_what_is_not_supported_is_one_sentence_and_training_is_untouched(
    four: LiveRanks, trial: Trial, why: str, tmp_path: Path
):
    trial = replace(trial, steps=2)
    alone, attached = four.ask((trial, None), 120), four.ask((trial, tmp_path), 120)
    for plain, told in zip(alone, attached, strict=True):
        assert told.bits == plain.bits
        assert told.failures == []
        assert told.status["replay"] == {"off": why}
        assert told.places == {name: told.groups[name] for name in told.places}


@pytest.mark.slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "megatron_core.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for first in (1, 6):
        told = losses_in(torchrun(4, ["-m", "tests.support.megatron_script", script], tmp_path))
        assert [*told] == [*range(first, first + 5)]
        losses |= told
    assert losses[10] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents.jsonl")]
