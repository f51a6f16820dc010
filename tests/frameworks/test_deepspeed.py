"""DeepSpeed as it is shipped, where the contracts of the catalog do not look: what is where, what is not
covered, what one rank alone holds, checkpoints after wrong numbers, collectives of its own groups."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evaluation.jobs.deepspeed import SOME_SMALL, WITHIN_PAIRS, Setup, build, master, scaled, train
from evaluation.jobs.job import Trial
from tests.support.job_ranks import (
    answering,
    ask,
    does_something_else,
    goes_back,
    overwritten,
    seen,
    skips_are_no_updates,
    surfaces,
)
from tests.support.links import is_named, slow
from tests.support.ranks import LiveRanks, run_ranks
from tests.support.scripts import EXAMPLES, losses_in, torchrun
from torchscout.attach import enable_resiliency
from torchscout.errors import ScoutError
from torchscout.faults.effects import FlipBit
from torchscout.faults.plan import FaultPlan
from torchscout.log import log
from torchscout.mesh import LayerKind

__all__ = ["answering"]

PIPELINE, AUTOTP = Setup(1, "pipeline", bf16=True), Setup(1, "tensor", bf16=True)
EXPERTS = Setup(2, "mixture", bf16=True)
ZERO_3 = Setup(3, bf16=True, zero=SOME_SMALL)
Places = dict[str, list[int]]


def places_of(rank: int, setup: Setup) -> tuple[Places, Places]:
    """Who is along which axis: as torchscout reads it off the engine, and of DeepSpeed's own groups."""
    engine = build(setup, rank).engine
    from deepspeed.utils import groups

    from torchscout.adapters.deepspeed import DeepSpeedAdapter

    data = "shard" if setup.stage == 3 else "replica"
    of: dict[tuple[str, LayerKind], Any] = {
        "pipeline": lambda: {
            (data, LayerKind.DENSE): engine.grid.get_data_parallel_group(),
            ("pipeline", LayerKind.DENSE): engine.grid.get_pipe_parallel_group(),
        },
        "ulysses": lambda: {
            (data, LayerKind.DENSE): groups._get_data_parallel_group(),
            ("context", LayerKind.DENSE): groups._get_sequence_parallel_group(),
        },
        "tensor": lambda: {
            (data, LayerKind.DENSE): groups.get_data_parallel_group(),
            ("tensor", LayerKind.DENSE): groups.get_tensor_model_parallel_group(),
        },
        "mixture": lambda: {
            (data, LayerKind.DENSE): engine.seq_data_parallel_group,
            ("expert", LayerKind.EXPERT): groups._get_expert_parallel_group(f"ep_size_{setup.parts}"),
            ("replica", LayerKind.EXPERT): groups._get_expert_data_parallel_group(f"ep_size_{setup.parts}"),
        },
    }.get(setup.kind, lambda: {(data, LayerKind.DENSE): engine.seq_data_parallel_group})()
    mesh = DeepSpeedAdapter(engine, None).mesh(["here"] * dist.get_world_size())
    ours = {f"{kind} {axis}": sorted(mesh.ranks_along(axis, rank, kind)) for axis, kind in of}
    theirs = {
        f"{kind} {axis}": sorted(dist.get_process_group_ranks(each)) for (axis, kind), each in of.items()
    }
    return ours, theirs


@pytest.mark.long
def test_ranks_are_where_deepspeed_has_them(four: LiveRanks):
    experts = (EXPERTS, Setup(0, "mixture", parts=4))
    for setup in (Setup(1), ZERO_3, PIPELINE, Setup(3, "ulysses", zero=SOME_SMALL), AUTOTP, *experts):
        for ours, theirs in four.ask(partial(places_of, setup=setup), 120):
            assert ours == theirs, setup


@pytest.mark.long
def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    skips_are_no_updates(ask(four, "deepspeed-zero2-fp16", Trial(steps=6, interval=1, run_dir=tmp_path)))


@pytest.mark.slow
def test_layers_that_cannot_be_called_again_leave_the_rest_checked_and_certified(
    four: LiveRanks, tmp_path: Path
):
    job, trial = partial(train, setup=Setup(0, "autoep")), Trial(steps=3, interval=1)
    attached = ask(four, job, Trial(steps=3, interval=1, run_dir=tmp_path))
    for plain, report in zip(ask(four, job, trial), attached, strict=True):
        assert (report.bits, report.failures, report.incidents) == (plain.bits, [], [])
        assert "AutoEP" in report.status["replay"]["covered"]["sentence"]
        assert {"state/parameters", "state/owned"} <= report.agreed
        assert report.certified == 3


@pytest.mark.slow
def test_parameters_that_are_written_in_the_forward_pass_are_named_as_not_covered(
    four: LiveRanks, tmp_path: Path
):
    trial = Trial(steps=4, interval=2, run_dir=tmp_path)
    for report in ask(four, partial(train, setup=Setup(3, zero=WITHIN_PAIRS)), trial):
        assert (report.failures, report.incidents, report.certified) == ([], [], 4)
        (names,) = report.status["replay"]["covered"]["missing"].values()
        assert "blocks.0.up/weight.secondary" in names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "zero2", "zero2-offload", "zero3"])
def test_all_working_copies_are_watched_between_updates(four: LiveRanks, name: str, tmp_path: Path):
    for report in ask(four, f"deepspeed-{name}", Trial(steps=4, interval=2, run_dir=tmp_path)):
        replay = report.status["replay"]
        assert (replay["certified"], replay["watched"], replay["covered"]["missing"]) == (4, 1.0, {})


def uninitialized(rank: int, trial: Trial) -> Any:
    """Train while PyTorch fills the memory that it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    from tests.support.job_ranks import Training

    return Training(partial(train, setup=ZERO_3), trial)(rank)


@pytest.mark.long
def test_what_zero_3_adds_to_make_partitions_equal_is_not_looked_at_for_nan(tmp_path: Path):
    """Three ranks do not divide every parameter, and DeepSpeed does not initialize what it adds."""
    for report in run_ranks(uninitialized, 3, Trial(steps=6, interval=1, run_dir=tmp_path), timeout=300):
        assert (report.failures, report.incidents, report.certified) == ([], [], 6)


def miscalculates(engine: Any) -> None:
    """Rank 2's optimizer gets one number of its part wrong in the third step, before others get it."""
    if dist.get_rank() != 2:
        return
    inner = engine.optimizer.optimizer

    def after(*_: Any) -> None:
        parts = [part for group in inner.param_groups for part in group["params"]]
        for part in parts if engine.global_steps == 2 else ():
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):
                FlipBit(3).corrupt(part.detach())

    inner.register_step_post_hook(after)


STAGES = pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Setup(1, bf16=True), id="1"),
        pytest.param(ZERO_3, id="3", marks=pytest.mark.slow),
    ],
)


@STAGES
@pytest.mark.long_cases("1")
def test_a_wrong_bit_in_what_one_rank_alone_holds_names_that_rank(
    four: LiveRanks, setup: Setup, tmp_path: Path
):
    found = overwritten(partial(train, setup=setup), master, four, tmp_path, (2, 3))[0].incidents
    assert (seen(found), surfaces(found)) == ([("sdc", "rank", (2,), 3)], {"state/owned"})


@STAGES
@pytest.mark.long_cases("1")
def test_a_wrong_update_of_what_one_rank_alone_holds_names_that_rank(
    four: LiveRanks, setup: Setup, tmp_path: Path
):
    # Whoever owns a replayed update is the source of its round, and that is rank 2 in the third step.
    trial = Trial(steps=4, interval=1, run_dir=tmp_path)
    found = ask(four, partial(train, setup=setup, prepare=miscalculates), trial)[0].incidents
    assert seen(found) == [("sdc", "rank", (2,), 3)]
    assert found[0].records[0].surface == "optimizer/update"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_owned_state_is_watched_while_an_update_is_skipped(four: LiveRanks, stage: int, tmp_path: Path):
    setup = Setup(stage, settings=scaled(19), zero=SOME_SMALL if stage == 3 else {})
    report = overwritten(partial(train, setup=setup), master, four, tmp_path, (2, 4))[0]
    assert any(each.step == 4 and "did not step" in str(each.reason) for each in report.numbers)
    assert seen(report.incidents) == [("sdc", "rank", (2,), 4)]
    assert report.status["replay"]["certified"] < 4


def weight(at: str, rank: int) -> Trial:
    return Trial(faults=FaultPlan().flip_bit(rank=rank, at=f"{at}/weight", step=4, bit=2))


def output(at: str, rank: int) -> Trial:
    """Wrong in the second batch of a step, and in all replays of it."""
    return Trial(
        faults=FaultPlan().flip_bit(rank=rank, at=f"{at}/output", step=4, bit=2, calls=range(1, 200))
    )


EXCLUDED = {
    "zero-1": (Setup(1), weight("blocks.0.down", 1)),
    "zero-3": (Setup(3, zero=SOME_SMALL), output("blocks.1", 1)),
    "pipeline": (PIPELINE, weight("3.up", 3)),
    "experts": (EXPERTS, weight("blocks.0.moe.deepspeed_moe.experts.deepspeed_experts.1.0", 3)),
    "autotp": (AUTOTP, weight("model.layers.0.mlp.down_proj", 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "spoiled"), EXCLUDED.values(), ids=EXCLUDED)
def test_no_checkpoint_after_wrong_numbers_is_loaded(
    four: LiveRanks, setup: Setup, spoiled: Trial, tmp_path: Path
):
    goes_back(four, partial(train, setup=setup), spoiled, 4, tmp_path)


SEQUENCES, LAYERS = "all_to_all@mesh_sequence_parallel", "all_reduce@mesh_tensor_parallel"
ELSEWHERE = {
    "zero-1, gathering": (Setup(1), "all_gather@undefined", "dtype", (1,)),
    "zero-2": (Setup(2, bf16=True), "all_reduce@undefined", "dtype", (1,)),
    "zero-3": (Setup(3, zero=SOME_SMALL), "reduce_scatter@default_pg", "dtype", (1,)),
    "zero-3 in pairs": (Setup(3, zero=WITHIN_PAIRS), "all_gather@undefined", "operation", (0, 1)),
    "pipeline, a transfer": (PIPELINE, "send@default_pg", "shape", (1, 3)),
    "experts": (Setup(0, "mixture", parts=4), "all_to_all@undefined", "dtype", (1,)),
    "ulysses": (Setup(3, "ulysses", zero=SOME_SMALL), SEQUENCES, "operation", (0, 1)),
    "autotp": (Setup(2, "tensor"), LAYERS, "operation", (0, 1)),
    "autotp of all": (Setup(1, "tensor", parts=4), "all_reduce@default_pg", "dtype", (1,)),
}
"""Of a group of three or more the rank is named, of two both."""


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "at", "what", "ranks"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_rank_with_another_collective_is_named(
    setup: Setup, at: str, what: str, ranks: tuple[int, ...], tmp_path: Path
):
    found = another(4, setup, at, what, tmp_path)
    scope = "rank" if len(ranks) == 1 else "process_group"
    assert {each[:3] for each in seen(found)} == {("hang", scope, ranks)}, found
    # That the two of a pair wait for each other would be another finding.
    assert all(each.records[0].surface.startswith("fingerprint/") for each in found), found


@pytest.mark.slow
def test_one_of_three_with_the_same_stage_and_another_collective_is_named(tmp_path: Path):
    found = another(6, PIPELINE, "all_gather@undefined", "shape", tmp_path)
    assert [each[1:3] for each in seen(found)] == [("rank", (1,))]


def another(size: int, setup: Setup, at: str, what: str, folder: Path) -> list[Any]:
    faults = FaultPlan().change_collective(rank=1, at=at, axis="replica", step=4, what=what)
    return does_something_else(size, partial(train, setup=setup), faults, folder)


LINKS = {
    "pipeline": (PIPELINE, "send@default_pg", "pipeline", (1, 4)),
    "a stage of three": (Setup(1, "pipeline", parts=3), "all_gather@undefined", "replica", (2, 3)),
    "experts": (EXPERTS, "all_to_all@undefined", "expert", (2, 3)),
    "ulysses": (Setup(1, "ulysses"), SEQUENCES, "context", (2, 3)),
    "autotp": (AUTOTP, LAYERS, "tensor", (2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "at", "axis", "ranks"), LINKS.values(), ids=LINKS)
def test_a_slow_link_names_its_process_group(
    six: LiveRanks, setup: Setup, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    trial = Trial(steps=6, interval=1, run_dir=tmp_path, faults=slow(ranks, at, axis))
    is_named(ranks, axis, ask(six, partial(train, setup=setup, apart=True), trial))


def newer(rank: int, folder: Path, removed: str | None = None) -> str:
    """What is logged or raised if DeepSpeed is newer than it is, and its engine lacks a method."""
    engine = build(Setup(), rank).engine
    import deepspeed

    with pytest.MonkeyPatch.context() as patch, logged() as written:
        patch.setattr(deepspeed, "__version__", "0.20.0")
        if removed is not None:
            patch.delattr(deepspeed.DeepSpeedEngine, removed)
        try:
            with enable_resiliency(engine, observer=None, run_dir=folder) as session:
                assert "off" not in session.status()["replay"]
        except ScoutError as error:
            return str(error)
        return next((line for line in written.getvalue().splitlines() if "0.20.0" in line), "")


@contextmanager
def logged() -> Iterator[io.StringIO]:
    handler = logging.StreamHandler(io.StringIO())
    log.addHandler(handler)
    yield handler.stream
    log.removeHandler(handler)


@pytest.mark.long
def test_a_newer_deepspeed_is_replayed_with_a_warning_unless_it_lacks_something_which_is_named(
    four: LiveRanks, tmp_path: Path
):
    warning, *others = four.ask(partial(newer, folder=tmp_path / "all"), 60)
    assert "0.20.0" in warning
    assert others == [""] * 3
    for refused in four.ask(partial(newer, folder=tmp_path / "less", removed="autotp_size"), 60):
        assert "0.20.0" in refused
        assert "deepspeed.DeepSpeedEngine.autotp_size" in refused


@pytest.mark.slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "deepspeed_zero.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for begin, end in ((1, 10), (11, 15)):
        printed = losses_in(torchrun(3, [script, "--steps", end], tmp_path, DS_ACCELERATOR="cpu"))
        assert [*printed] == [*range(begin, end + 1)]
        losses |= printed
    assert losses[15] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents/*")]
