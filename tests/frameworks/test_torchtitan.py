"""TorchTitan's own trainer beyond the contracts: its releases, its groups, its override, its checkpoints."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Job, Report, Trial
from evaluation.jobs.titan import Setup, config_of, make_assets, prepare, train
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, ROOT, torchrun
from tests.support.titan_jobs import Question, answering, found
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import preload

__all__ = ["answering"]

preload("evaluation.jobs.titan_cpu", "torchtitan.models.llama3.config_registry")
slow = pytest.mark.slow
OVERRIDE = "torchscout.plugins.torchtitan.resiliency"
NAMES = [name for name in CATALOG if name.startswith("titan-")]


def setup_of(name: str) -> Setup:
    return CATALOG[name].train.keywords["setup"]


def attach_to_another_version(_rank: int, removed: str | None) -> list[str]:
    """What is logged or raised if TorchTitan is newer than it is, and its Trainer lacks something."""
    prepare()
    import torchtitan
    from torchtitan.trainer import Trainer

    from torchscout.adapters.registry import adapter_for
    from torchscout.errors import ScoutError
    from torchscout.log import log

    trainer = config_of(Setup()).build()
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchtitan, "__version__", "0.4.0")
        patch.setattr(log, "warning", lambda text, *values: seen.append(text % values))
        if removed is not None:
            patch.delattr(trainer if removed in vars(trainer) else Trainer, removed)
        try:
            assert adapter_for(trainer, None, None).obstacle is None
        except ScoutError as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize(("removed", "said"), [(None, "0.3.0"), ("lr_schedulers", "Trainer.lr_schedulers")])
def test_a_newer_release_is_accepted_unless_it_lacks_something(removed: str | None, said: str):
    ((seen,),) = run_ranks(attach_to_another_version, 1, removed, timeout=120)
    assert "torchtitan 0.4.0" in seen
    assert said in seen


def groups(rank: int, names: list[str]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The members of the framework's own groups, by the name of the axis, and the same by the mesh."""
    return [(name, *groups_of(rank, setup_of(name))) for name in names]


def groups_of(rank: int, setup: Setup) -> tuple[dict[str, Any], dict[str, Any]]:
    prepare()
    from torchscout.adapters.torchtitan import TorchTitanAdapter
    from torchscout.mesh import LayerKind

    trainer = config_of(setup).build()
    mesh = TorchTitanAdapter(trainer).mesh([""] * dist.get_world_size())
    axes = {
        "pp": ("pipeline", LayerKind.DENSE),
        "dp_replicate": ("replica", LayerKind.DENSE),
        "dp_shard": ("shard", LayerKind.DENSE),
        "cp": ("context", LayerKind.DENSE),
        "tp": ("tensor", LayerKind.DENSE),
        "ep": ("expert", LayerKind.EXPERT),
        "efsdp": ("shard", LayerKind.EXPERT),
    }
    if trainer.parallel_dims.cp == 1:
        axes["fsdp"] = ("shard", LayerKind.DENSE)
    theirs = {
        name: tuple(dist.get_process_group_ranks(devices.get_group()))
        for name, devices in trainer.parallel_dims.get_all_one_dimensional_meshes().items()
        if name in axes
    }
    return theirs, {name: mesh.ranks_along(axes[name][0], rank, axes[name][1]) for name in theirs}


@slow
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_the_mesh_has_the_groups_of_the_framework(ranks: int):
    names = [name for name in NAMES if CATALOG[name].ranks == ranks]
    for of_rank in run_ranks(groups, ranks, names, timeout=300):
        for name, theirs, ours in of_rank:
            assert theirs, name
            assert theirs == ours, name


def attach_with_parallelism(_rank: int) -> None:
    prepare()
    enable_resiliency(config_of(Setup()).build(), parallelism=Parallelism(replica=1))


@slow
def test_a_parallelism_beside_that_of_the_trainer_is_refused():
    with pytest.raises(RankError, match="pass only the Trainer"):
        run_ranks(attach_with_parallelism, 1, timeout=120)


def overridden(
    rank: int, name: str, trial: Trial, folder: Path | None, is_kept: bool, own: Path | None
) -> Report:
    """Train with SCOUT as the config's override attaches it, where there is a folder for what it writes."""
    os.environ["TORCHSCOUT_MEMORY"] = str(folder and folder / "memory")
    prepare()
    config = config_of(setup_of(name))
    if own is not None:
        config.dump_folder = str(own)
        config.checkpoint.enable, config.checkpoint.interval = True, 3
    if folder is not None:
        settings = {"replay": {"interval": 1}, "observer": None, "run_dir": str(folder / "run")}
        kept = {"directory": str(folder / "files")} if is_kept else None
        config.override.imports = [(OVERRIDE, {**settings, "checkpoint": kept})]
    job, trainer = Job(rank, trial), config.build()
    train(job, trainer)
    report = job.finish()
    if folder is not None:
        report.failures = list(trainer.checkpointer.session.failures)
    local = (each.to_local() for part in trainer.model_parts for each in part.parameters())
    report.status["weights"] = [each.tolist() for each in local]
    return report


def goes_on(alone: list[Report], again: list[Report]) -> int:
    """Check that training ended as if it had not been interrupted; return its first step."""
    for before, after in zip(alone, again, strict=True):
        assert after.failures == []
        assert after.bits == {step: before.bits[step] for step in after.bits}
        assert max(after.bits) == max(before.bits)
    (first,) = {min(each.bits) for each in again}
    return first


@slow
@pytest.mark.parametrize("name", ["titan-rich", "titan-interleaved"])
def test_a_killed_job_goes_on_bitwise_through_the_override(name: str, tmp_path: Path):
    size = CATALOG[name].ranks
    alone = run_ranks(overridden, size, name, Trial(steps=6), None, False, None, timeout=300)
    with pytest.raises(RankError):
        run_ranks(overridden, size, name, Trial(steps=6, end=5), tmp_path, True, None, timeout=300)
    again = run_ranks(overridden, size, name, Trial(steps=6), tmp_path, True, None, timeout=300)
    assert goes_on(alone, again) in (4, 5)


@slow
@pytest.mark.parametrize("is_kept", [False, True], ids=["alone", "both"])
def test_checkpoints_of_torchtitans_own_go_on_working(is_kept: bool, tmp_path: Path):
    """They have step 3, without random streams; what SCOUT kept is of a later step, and wins."""
    asked = (tmp_path, is_kept, tmp_path / "own")
    alone = run_ranks(overridden, 2, "titan-fsdp", Trial(steps=6), None, False, None, timeout=300)
    with pytest.raises(RankError):
        run_ranks(overridden, 2, "titan-fsdp", Trial(steps=6, end=6), *asked, timeout=300)
    assert (tmp_path / "own" / "checkpoint" / "step-3").is_dir()
    again = run_ranks(overridden, 2, "titan-fsdp", Trial(steps=6), *asked, timeout=300)
    if is_kept:
        assert goes_on(alone, again) in (5, 6)
    for before, after in zip(alone, again, strict=True):
        assert is_kept or min(after.bits) == 4
        assert after.status["weights"] == before.status["weights"]


@slow
def test_after_a_wrong_number_a_job_goes_on_from_before_it(tmp_path: Path):
    """Training has it too, and so have all later steps of that run."""
    faults = FaultPlan().flip_bit(rank=2, at="layers.1/output", step=2, bit=20, calls=range(200))
    trial = Trial(steps=5, interval=1, checkpoints=tmp_path / "kept", run_dir=tmp_path / "again")
    with Ranks(Attempt("titan-fsdp", tmp_path / "run", tmp_path)) as ranks:
        alone = ranks.train(Trial(steps=5)).reports
        wrong = ranks.train(replace(trial, run_dir=tmp_path / "wrong", faults=faults)).reports
        again = ranks.train(trial).reports
    assert found(wrong) == {("sdc", "rank", (2,))}
    assert all(one.bits[5] != other.bits[5] for one, other in zip(alone, wrong, strict=True))
    assert goes_on(alone, again) == 2


@slow
@pytest.mark.parametrize("place", range(4))
def test_no_optimizer_of_any_part_goes_unwatched(four: LiveRanks, place: int, tmp_path: Path):
    """Two parts on a rank, with two optimizers each."""
    trial = Trial(steps=3, interval=1, run_dir=tmp_path)
    question = Question(setup_of("titan-interleaved"), trial, spoiled=(1, 2, place))
    (incident,) = four.ask(question, 300)[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


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
        seen = re.findall(r"step: +(\d+) .*?loss: +(\d+\.\d+)", re.sub(r"\x1b\[\d+m", "", printed))
        assert sorted({int(step) for step, _ in seen}) == [*range(first, last + 1)], printed
        losses += [float(loss) for _, loss in seen]
    assert losses[-1] < losses[0]
    assert not [*tmp_path.glob("outputs/scout/incidents/*")]
