"""TorchTitan's own trainer: nothing changes, what goes wrong is named, and what was kept comes back."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hangs import incidents, wait_for_incident
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, ROOT, torchrun
from tests.support.titan_jobs import Trial, answering, make_assets, train
from torchscout.cli.local_ranks import preload
from torchscout.config import ObserverConfig, Parallelism
from torchscout.faults.fault import Faults
from torchscout.mesh import Mesh

preload("tests.support.titan_jobs")

slow = pytest.mark.slow
REPLAY = range(1, 9)
"""Passes that are not training's own."""
ALL = None
PATIENT = ObserverConfig(floor_seconds=2.0, multiple=3.0, start_seconds=120.0, grace_seconds=8.0)
REPLICATE = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
HSDP = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
FULL = {"spmd_backend": "full_dtensor", **TENSOR}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PARTS = {"tok_embeddings", "layers.0", "layers.1", "lm_head"}
CHUNKS = {"0.tok_embeddings", "0.layers.0", "0.layers.1", "0.layers.2", "1.layers.3", "1"}
"""The last stage has but a norm and the output layer, and is one part of the model."""
EXPERTS = "layers.1.moe.routed_experts.inner_experts"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 8) as ranks:
        yield ranks


def is_healthy(ranks: LiveRanks, trial: Trial, axes: set[str], folder: Path) -> set[str]:
    """Nothing changed, nobody was blamed, all was checked on the framework's own groups; what agreed."""
    alone, checked = ranks.ask((trial, None), 300), ranks.ask((trial, folder), 300)
    agreed: set[str] = set()
    for plain, told in zip(alone, checked, strict=True):
        assert (told.failures, told.incidents, told.unchecked) == ([], [], {})
        assert (told.bits, told.progress) == (plain.bits, plain.progress)
        assert told.groups == told.along
        assert set(told.groups) == axes
        agreed |= told.agreed
        assert told.uneven or not trial.is_mixture
    assert {"optimizer/param", "optimizer/reproduced"} <= agreed
    return agreed


@pytest.mark.parametrize(
    ("parallelism", "axes", "state"),
    [
        pytest.param(REPLICATE, {"dp_replicate"}, "state/parameters", id="replicate"),
        pytest.param(TENSOR, {"fsdp", "tp"}, "state/at_rest", id="tensor"),
        pytest.param({}, {"fsdp"}, "state/at_rest", id="fsdp", marks=slow),
        pytest.param(HSDP, {"dp_replicate", "fsdp"}, "state/parameters", id="hsdp", marks=slow),
        pytest.param(CONTEXT, {"cp"}, "state/at_rest", id="context", marks=slow),
        pytest.param(FULL, {"dp_shard", "tp"}, "state/at_rest", id="full_dtensor", marks=slow),
    ],
)
def test_training_is_bitwise_the_same_and_everything_is_checked(
    four: LiveRanks, parallelism: dict[str, Any], axes: set[str], state: str, assets: Path, tmp_path: Path
):
    agreed = is_healthy(four, Trial(assets, parallelism), axes, tmp_path)
    assert {state, *(f"{part}/output" for part in PARTS)} <= agreed


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        pytest.param(INTERLEAVED, CHUNKS, id="interleaved"),
        pytest.param(PIPELINE, PARTS | {"layers.2", "layers.3"}, id="1f1b", marks=slow),
    ],
)
def test_every_stage_of_a_pipeline_is_checked(
    four: LiveRanks, schedule: dict[str, Any], names: set[str], assets: Path, tmp_path: Path
):
    agreed = is_healthy(four, Trial(assets, schedule, layers=4), {"pp", "fsdp"}, tmp_path)
    assert {f"{name}/output" for name in names} <= agreed


@slow
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "in pieces"])
def test_neither_accumulation_nor_validation_nor_a_loss_in_pieces_changes_that(
    four: LiveRanks, chunked: bool, assets: Path, tmp_path: Path
):
    trial = Trial(assets, chunked=chunked, accumulation=2, validated=True)
    assert "layers.1/output" in is_healthy(four, trial, {"fsdp"}, tmp_path)


@slow
def test_experts_with_uneven_rows_are_checked_and_silent(four: LiveRanks, assets: Path, tmp_path: Path):
    agreed = is_healthy(
        four, Trial(assets, EXPERT, is_mixture=True, steps=8), {"fsdp", "ep", "efsdp"}, tmp_path
    )
    assert {f"{EXPERTS}/output", f"{EXPERTS}/w1_EFD.grad", "all_to_all/captured.received"} <= agreed


@slow
def test_eight_ranks_of_pipeline_tensor_and_data_parallelism(eight: LiveRanks, assets: Path, tmp_path: Path):
    agreed = is_healthy(eight, Trial(assets, {**PIPELINE, **TENSOR}), {"pp", "tp", "fsdp"}, tmp_path)
    assert {f"{part}/output" for part in PARTS} <= agreed


@slow
def test_eight_ranks_of_expert_and_tensor_parallelism(eight: LiveRanks, assets: Path, tmp_path: Path):
    trial = Trial(assets, {"expert_parallel_degree": 4, **TENSOR}, is_mixture=True)
    agreed = is_healthy(eight, trial, {"fsdp", "tp", "ep", "efsdp"}, tmp_path)
    assert {f"{EXPERTS}/output", "all_to_all/captured.received"} <= agreed


def overridden(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "replay": {"interval": 1},
        "observer": None,
        "checkpoint": {"directory": str(folder / "kept" / "files")},
        "run_dir": str(folder / "scout"),
        **changes,
    }


def all_killed(step: int) -> Faults:
    faults = Faults()
    for rank in range(4):
        faults = faults.kill(rank=rank, at="step", step=step)
    return faults


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param({"parallelism": HSDP}, id="hsdp"),
        pytest.param({"parallelism": REPLICATE}, id="replicate", marks=slow),
        pytest.param({"parallelism": {}}, id="fsdp", marks=slow),
        pytest.param({"parallelism": PIPELINE}, id="pipeline", marks=slow),
        pytest.param({"parallelism": INTERLEAVED, "layers": 4}, id="interleaved", marks=slow),
        pytest.param({"parallelism": EXPERT, "is_mixture": True}, id="expert", marks=slow),
        pytest.param({"parallelism": TENSOR}, id="tensor", marks=slow),
        pytest.param({"parallelism": CONTEXT}, id="context", marks=slow),
    ],
)
def test_a_killed_job_goes_on_bitwise_through_the_override(
    four: LiveRanks, whole: dict[str, Any], assets: Path, tmp_path: Path
):
    """With gradient accumulation and two kinds of optimizers; schedule, data position and random streams
    come back too."""
    trial = Trial(assets, accumulation=2, kinds=True, **whole)
    kept = replace(trial, overridden=overridden(tmp_path), directory=tmp_path / "kept")
    with pytest.raises(RankError):
        run_ranks(train, 4, replace(kept, faults=all_killed(5)), tmp_path / "scout", timeout=300)
    alone, resumed = four.ask((trial, None), 300), four.ask((kept, tmp_path / "scout"), 300)
    for before, after in zip(alone, resumed, strict=True):
        assert after.failures == []
        assert 3 <= after.resumed <= 4
        assert after.progress == before.progress
        assert after.bits == before.bits


@slow
@pytest.mark.parametrize("both", [False, True], ids=["alone", "both"])
def test_checkpoints_of_torchtitans_own_go_on_working(
    four: LiveRanks, both: bool, assets: Path, tmp_path: Path
):
    """They have step 3, and no random streams; what SCOUT kept is of a later step, and wins."""
    settings = overridden(tmp_path) if both else overridden(tmp_path, checkpoint=None)
    trial = Trial(assets, own=tmp_path / "own", overridden=settings, directory=tmp_path / "kept")
    with pytest.raises(RankError):
        run_ranks(train, 4, replace(trial, faults=all_killed(6)), tmp_path / "scout", timeout=300)
    assert (tmp_path / "own" / "checkpoint" / "step-3").is_dir()
    alone, resumed = four.ask((Trial(assets), None), 300), four.ask((trial, tmp_path / "scout"), 300)
    for before, after in zip(alone, resumed, strict=True):
        assert after.failures == []
        assert (after.resumed >= 4) is both
        assert after.status["step"] == 6
        assert {**after.bits, "random": ""} == {**before.bits, "random": ""}
        assert after.progress == before.progress


def flipped(rank: int, layer: str = "layers.1", calls: range = REPLAY) -> Faults:
    return Faults().flip_bit(rank=rank, at=f"{layer}/output", step=2, bit=20, calls=calls)


@pytest.mark.parametrize(
    ("whole", "layer", "found"),
    [
        pytest.param({}, "layers.1", ("sdc", "rank", (2,)), id="fsdp"),
        *(
            pytest.param({"parallelism": parallelism, **more}, layer, found, id=name, marks=slow)
            for name, parallelism, more, layer, found in (
                ("replicate", REPLICATE, {}, "layers.1", ("sdc", "rank", (2,))),
                ("hsdp", HSDP, {}, "layers.1", ("sdc", "rank", (2,))),
                ("tensor", TENSOR, {}, "layers.1", ("sdc", "peer_group", (0, 2))),
                ("pipeline", PIPELINE, {}, "layers.1", ("sdc", "peer_group", (2, 3))),
                ("interleaved", INTERLEAVED, {"layers": 4}, "0.layers.2", ("sdc", "peer_group", (2, 3))),
                ("context", CONTEXT, {}, "layers.1", ("sdc", "peer_group", (0, 2))),
            )
        ),
    ],
)
def test_a_wrong_number_names_the_rank_and_nothing_is_kept_after_it(
    four: LiveRanks, whole: dict[str, Any], layer: str, found: Any, assets: Path, tmp_path: Path
):
    trial = Trial(assets, steps=3, faults=flipped(2, layer), directory=tmp_path / "kept", **whole)
    told = four.ask((trial, tmp_path / "scout"), 200)
    assert told[2].fired
    assert told[0].found == {found}, [each.sentence for each in told[0].incidents]
    assert [each.status["checkpoint"]["latest"] for each in told] == [1] * 4


@slow
def test_a_wrong_number_in_experts_names_their_holders(four: LiveRanks, assets: Path, tmp_path: Path):
    # Training calls them twice: activation checkpointing computes them again in backward.
    faults = flipped(2, EXPERTS.replace("layers.1", "layers.1._checkpoint_wrapped_module"), range(2, 9))
    trial = Trial(assets, EXPERT, is_mixture=True, steps=3, faults=faults)
    told = four.ask((trial, tmp_path), 300)
    assert told[2].fired
    assert told[0].found == {("sdc", "peer_group", (0, 2))}, [each.sentence for each in told[0].incidents]


@pytest.mark.parametrize("place", [*(pytest.param(each, marks=slow) for each in range(3)), 3])
def test_no_optimizer_of_any_part_goes_unwatched(four: LiveRanks, place: int, assets: Path, tmp_path: Path):
    """Two parts on a rank, with two optimizers each."""
    trial = Trial(assets, INTERLEAVED, layers=4, steps=3, kinds=True, spoiled=(1, 2, place))
    told = four.ask((trial, tmp_path), 200)
    (incident,) = told[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/at_rest"}


@pytest.mark.parametrize(
    ("parallelism", "found"),
    [
        pytest.param(REPLICATE, ("rank", (2,)), id="replicate"),
        pytest.param({}, ("rank", (2,)), id="fsdp", marks=slow),
        pytest.param(TENSOR, ("peer_group", (0, 2)), id="tensor", marks=slow),
        pytest.param(PIPELINE, ("peer_group", (2, 3)), id="pipeline", marks=slow),
        pytest.param(CONTEXT, ("peer_group", (0, 2)), id="context", marks=slow),
    ],
)
def test_a_slow_layer_names_its_rank(
    four: LiveRanks, parallelism: dict[str, Any], found: Any, assets: Path, tmp_path: Path
):
    """Of two that do the same work, both: nothing says which is as it should be."""
    faults = Faults()
    for layer in (0, 1):
        at = f"layers.{layer + 2 * (parallelism is PIPELINE)}/forward"
        faults = faults.delay(rank=2, at=at, step=range(3, 9), seconds=0.3, calls=ALL)
    told = four.ask((Trial(assets, parallelism, layers=4, faults=faults), tmp_path), 300)
    assert told[2].fired >= 8
    named = {each for one in told for each in one.found}
    assert named == {("straggler", *found)}, [each.sentence for each in told[0].incidents]


@slow
def test_a_slow_link_names_its_machine(assets: Path, tmp_path: Path):
    """Of three groups of shards, each on a machine of its own; two could only differ."""
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode != 0:
        pytest.skip("ranks cannot have host names of their own here")
    faults = Faults().slow_collective(
        ranks=(2, 3), at="all_gather@mesh_fsdp", axis="shard", step=range(3, 9), seconds=0.4
    )
    trial = Trial(assets, {"data_parallel_replicate_degree": 3}, steps=7, faults=faults, machine=2)
    told = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert told[2].fired >= 4
    (incident,) = told[0].incidents
    hosts = [f"machine-{rank // 2}" for rank in range(6)]
    (truth,) = faults.truth(Mesh.grid(replica=3, shard=2, hosts=hosts))
    assert truth.is_told_by(incident), incident.sentence
    assert (incident.ranks, incident.hosts) == ((2, 3), ("machine-1",))


@pytest.mark.parametrize(
    "parallelism",
    [{}, *(pytest.param(each, marks=slow) for each in (TENSOR, PIPELINE, CONTEXT, HSDP))],
    ids=["fsdp", "tensor", "pipeline", "context", "hsdp"],
)
def test_a_late_rank_is_named(four: LiveRanks, parallelism: dict[str, Any], assets: Path, tmp_path: Path):
    faults = Faults().stall(rank=2, at="layers.1/forward", step=4, seconds=10.0)
    trial = Trial(assets, parallelism, steps=5, faults=faults, replay=None, observer=PATIENT)
    told = four.ask((trial, tmp_path), 240)
    assert told[2].fired == 1
    assert told[0].found == {("hang", "rank", (2,))}, [each.sentence for each in told[0].incidents]


@slow
@pytest.mark.parametrize(
    ("parallelism", "at", "axis", "what"),
    [
        pytest.param(REPLICATE, "all_reduce@default_pg", "replica", "shape", id="replicate"),
        pytest.param({}, "reduce_scatter@default_pg", "shard", "dtype", id="fsdp"),
    ],
)
def test_a_rank_that_does_something_else_is_named(
    parallelism: dict[str, Any], at: str, axis: str, what: str, assets: Path, tmp_path: Path
):
    # An axis over all ranks has no group of its own in PyTorch, but the default one.
    faults = Faults().change_collective(rank=2, at=at, axis=axis, step=4, what=what)
    fired = tmp_path / "fired"
    trial = Trial(assets, parallelism, steps=5, faults=faults, log=fired, replay=None, observer=PATIENT)
    with suppress(RankError):  # Gloo may abort a process over it, or never return
        run_ranks(train, 4, trial, tmp_path, timeout=90)
    assert fired.read_text().count("\n") == 1
    wait_for_incident(tmp_path)
    found = incidents(tmp_path)
    assert {(each.manifestation.value, each.ranks) for each in found} == {("hang", (2,))}, found


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        pytest.param({"graphs": True}, "CUDA graphs call no hooks; pass --training.disable_cuda_graphs"),
        pytest.param(
            {"told": {"spmd_backend": "spmd_types"}},
            "layers under spmd_types can only be called within TorchTitan's own step; "
            "pass --parallelism.spmd_backend partial_dtensor",
            marks=slow,
        ),
    ],
    ids=["graphs", "spmd_types"],
)
def test_what_cannot_be_replayed_is_one_sentence_and_training_is_untouched(
    four: LiveRanks, trial: dict[str, Any], said: str, assets: Path, tmp_path: Path
):
    """PyTorch 2.13 is too old for spmd_types: the trainer only says that it is on."""
    watched = Trial(assets, steps=2, observer=PATIENT, **trial)
    alone, attached = four.ask((watched, None), 200), four.ask((watched, tmp_path), 200)
    for plain, told in zip(alone, attached, strict=True):
        assert (told.bits, told.progress) == (plain.bits, plain.progress)
        assert (told.failures, told.incidents) == ([], [])
        assert told.status["replay"] == {"off": said}
        assert told.status["step"] == 2


@slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"given": {"parallelism": Parallelism(replica=1)}}, "pass the Trainer alone"),
        ({"graphs": True, "directory": Path("kept")}, "checkpoint= needs replay"),
    ],
    ids=["parallelism", "checkpoint"],
)
def test_what_a_user_must_change_is_refused(changes: dict[str, Any], said: str, assets: Path, tmp_path: Path):
    with pytest.raises(RankError, match=said):
        run_ranks(train, 1, Trial(assets, **changes), tmp_path, timeout=120)


@slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    folder = EXAMPLES / "frameworks"
    assert (folder / "torchtitan_llama.py").read_text().count("\n") < 60
    (tmp_path / "tests" / "assets").mkdir(parents=True)  # as in TorchTitan's own repository
    make_assets(tmp_path / "tests" / "assets")
    job = ["-m", "tests.support.titan_script", "--module", "torchtitan_llama", "--config", "watched"]
    small = ["--training.local-batch-size", 1, "--training.seq-len", 64, "--training.steps"]
    losses: list[float] = []
    for first, last in ((1, 7), (6, 11)):
        printed = torchrun(4, [*job, *small, last], tmp_path, PYTHONPATH=f"{ROOT}:{folder}")
        told = re.findall(r"step: +(\d+) .*?loss: +(\d+\.\d+)", re.sub(r"\x1b\[\d+m", "", printed))
        assert sorted({int(step) for step, _ in told}) == [*range(first, last + 1)], printed
        losses += [float(loss) for _, loss in told]
    assert losses[-1] < losses[0]
    assert not [*tmp_path.glob("outputs/scout/incidents.jsonl")]
