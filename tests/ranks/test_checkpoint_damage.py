"""Checkpoints that were damaged, deleted or left by another job: never loaded, nor passed over silently.

One job was killed after nine steps with a check at every step: step 9, the latest, is in memory and in files,
step 8 in memory, step 7 in files. Each test spoils something of that, and starts the job again.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.ranks.test_log_of_jobs import keep_log, lines_of
from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint.storage.shards import inspect
from torchscout.checkpoint.trust.generation import TrustLevel
from torchscout.cli.main import app
from torchscout.faults.storage import Cut, Damage, Delete, FlipFileBit, copies, spoil

STEPS, MORE = 9, 11


@dataclass(frozen=True)
class Left:
    """What a job has left."""

    plan: Plan
    alone: list[Result]
    """The same job without SCOUT."""

    @property
    def memory(self) -> Path:
        assert self.plan.memory is not None
        (folder,) = self.plan.memory.iterdir()
        return folder

    @property
    def disk(self) -> Path:
        assert self.plan.directory is not None
        return self.plan.directory

    def copies(self, rank: int, step: int) -> list[Path]:
        return copies([self.memory, self.disk], rank, step)

    def again(self, ranks: int = 2, **changes: object) -> list[Result]:
        plan = replace(self.plan, steps=MORE, run_dir=self.plan.run_dir.with_name("again"), **changes)
        return run_ranks(train, ranks, plan, timeout=60)

    def refused(self, ranks: int = 2, **changes: object) -> str:
        """What every rank says when the job cannot go on."""
        with pytest.raises(RankError) as raised:
            self.again(ranks, **changes)
        message = str(raised.value)
        refusals = re.findall(r"^torchscout\.errors\.(?:Checkpoint|Unavailable)Error", message, re.MULTILINE)
        assert len(refusals) == ranks, message
        return message

    def started_over(self, message: str) -> None:
        """The way out that every refusal names."""
        assert message.count("session.resume(start_over=True)") >= 2
        assert "pass another directory to CheckpointConfig" in message
        for mine, theirs in zip(self.again(start_over=True), self.alone, strict=True):
            assert mine.resumed is not None
            assert (mine.resumed.step, mine.resumed.role) == (0, None)
            assert "The job starts from step 0, as requested" in mine.resumed.reason
            assert mine.bits == theirs.bits
            assert (mine.failures, mine.status["latest"]) == ([], MORE - 1)

    def explained(self) -> int | None:
        """The step that `scout checkpoint explain` expects the job to go on from."""
        command = ["checkpoint", "explain", str(self.memory), str(self.disk), "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        (decided,) = [each for each in json.loads(done.stdout)["decisions"] if each["failure"] == "other"]
        return None if decided["generation"] is None else int(decided["generation"]["step"])

    def went_on(self, step: int, sources: tuple[str, ...]) -> list[str]:
        """The job goes on from this step, with every rank's state from there; what was said meanwhile."""
        assert self.explained() == step
        results = self.again()
        for mine, theirs, source in zip(results, self.alone, sources, strict=True):
            assert mine.resumed is not None
            assert (mine.resumed.step, mine.resumed.role) == (step, TrustLevel.VERIFIED), mine.resumed
            assert mine.resumed.source == f"its own {source}"
            assert mine.bits == {each: theirs.bits[each] for each in range(step + 1, MORE + 1)}
            assert mine.failures == []
        return [problem for mine in results for problem in mine.status["problems"]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Left:
    root = tmp_path_factory.mktemp("damage")
    plan = Plan(
        "ddp",
        STEPS,
        interval=1,
        directory=root / "there" / "checkpoints",
        memory=root / "there" / "memory",
        run_dir=root / "run",
        timeout_seconds=10.0,
    )
    killed = replace(plan, steps=STEPS + 1, killed={0: STEPS + 1, 1: STEPS + 1}, files_written=True)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 2, killed, timeout=60)
    shutil.copytree(root / "there", root / "whole")
    return Left(plan, run_ranks(train, 2, replace(plan, directory=None, steps=MORE), timeout=60))


@pytest.fixture
def left(kept: Left) -> Left:
    """As it was, whatever the last test did."""
    there = kept.disk.parent
    shutil.rmtree(there)
    shutil.copytree(there.with_name("whole"), there)
    for rank in (0, 1):
        assert [len(kept.copies(rank, step)) for step in (9, 8)] == [2, 1], "what the tests count on"
        assert copies([kept.disk], rank, 7)
    return kept


@dataclass(frozen=True)
class FlipTensorBit(Damage):
    """Of the largest tensor whose name begins like this."""

    part: str

    def happen(self, path: Path) -> None:
        header = inspect(path)
        entry = max(
            (each for each in header.entries if each.name.startswith(self.part)), key=lambda e: e.length
        )
        FlipFileBit((entry.offset + entry.length // 2) / header.size).happen(path)


OWN_STATE = FlipTensorBit("rng/torch")
"""Every rank's random state is different here, and no rank has a copy of another's."""
SPOIL: dict[str, Damage] = {
    "a bit of the header": FlipFileBit(0.001),
    "a bit of a tensor": FlipFileBit(0.6),
    "its random state": OWN_STATE,
    "the last bit": FlipFileBit(1.0, 7),
    "the end is missing": Cut(0.9),
    "it is empty": Cut(0.0),
    "it is deleted": Delete(),
}
MIDDLE = FlipFileBit(0.5)


@pytest.mark.slow_cases("a bit of the header", "it is deleted", "it is empty", "the end is missing")
@pytest.mark.parametrize("how", SPOIL)
def test_a_damaged_snapshot_is_not_loaded_and_its_file_is(left: Left, how: str):
    lost = spoil(copies([left.memory], 1, STEPS), SPOIL[how])
    problems = left.went_on(STEPS, ("memory", "disk"))
    assert lost.is_reported_in(problems), problems


@pytest.mark.parametrize("how", ["a bit of the header", "its random state", "it is deleted"])
def test_all_ranks_take_the_generation_before_if_one_of_them_has_lost_the_newest(left: Left, how: str):
    spoil(left.copies(1, STEPS), SPOIL[how])
    problems = left.went_on(STEPS - 1, ("memory", "memory"))
    assert not any("identical bytes" in each for each in problems)


@pytest.mark.parametrize("part", ["parameters/", "slots/"])
def test_a_replicas_identical_tensor_takes_the_place_of_a_damaged_one(left: Left, part: str):
    """Every copy of rank 1's step 9 is damaged, and rank 0 has the same parameters and optimizer state."""
    lost = spoil(left.copies(1, STEPS), FlipTensorBit(part))
    problems = left.went_on(STEPS, ("memory", "memory"))
    assert lost.is_reported_in(problems), problems
    message = (
        f"1 damaged tensor of rank 1's state at step {STEPS} was replaced with identical bytes from rank 0"
    )
    assert message in problems


def logged(rank: int, plan: Plan, logs: Path) -> Result:
    keep_log(logs, rank)
    return train(rank, plan)


@pytest.mark.parametrize("how", ["a bit of the header", "parameters"])
def test_each_damaged_shard_is_logged_once(left: Left, how: str, tmp_path: Path):
    lost = spoil(left.copies(1, STEPS), SPOIL.get(how, FlipTensorBit("parameters/")))
    plan = replace(left.plan, steps=STEPS, run_dir=tmp_path / "run")
    run_ranks(logged, 2, plan, tmp_path, timeout=60)
    lines, others = (lines_of(tmp_path, rank) for rank in (0, 1))
    assert [sum(str(path) in line for line in lines) for path in lost.paths] == [1, 1], lines
    assert not any("damaged" in line for line in others), others


def test_older_checkpoints_are_tried_from_verified_to_verified(left: Left):
    """Step 9 is damaged on one rank and step 8 on the other: 7 is the newest that both have."""
    spoil([*left.copies(0, 9), *left.copies(1, 8)], OWN_STATE)
    for path in [*copies([left.memory], 0, 7), *copies([left.memory], 1, 7)]:
        path.unlink()
    left.went_on(7, ("disk", "disk"))


def test_an_intact_generation_that_one_rank_has_not_certified_is_not_loaded(left: Left):
    """Rank 0 was killed before it had written down that step 9 is certified."""
    for folder in (left.memory, left.disk):
        (folder / "rank-0.ledger").unlink()
        assert (folder / "rank-0.ledger.previous").exists()
    assert all(len(left.copies(rank, STEPS)) == 2 for rank in (0, 1))
    left.went_on(STEPS - 1, ("memory", "memory"))


def test_damage_everywhere_is_reported_on_every_rank_and_nothing_is_loaded(left: Left):
    spoil([*left.memory.glob("step-*/rank-1-*"), *left.disk.glob("step-*/rank-1-*")], OWN_STATE)
    message = left.refused()
    assert "No checkpoint is left that may be loaded" in message
    assert "no whole shard of rank 1 is left" in message
    left.started_over(message)


@pytest.mark.parametrize("spoiled", ["memory", "disk"])
def test_one_damaged_ledger_does_no_harm(left: Left, spoiled: str):
    folder = getattr(left, spoiled)
    spoil(list(folder.glob("rank-1.ledger*")), MIDDLE)
    problems = left.went_on(STEPS, ("memory", "memory"))
    assert any("rank-1.ledger is damaged" in each for each in problems)


def test_a_rank_without_any_ledger_relies_on_the_others(left: Left):
    spoil([*left.memory.glob("rank-1.ledger*"), *left.disk.glob("rank-1.ledger*")], Delete())
    left.went_on(STEPS, ("memory", "memory"))


def test_a_ledger_of_an_earlier_lineage_is_ignored(left: Left):
    """Its machine was away while the job went on without it, and is back with what it had then."""
    then = {path: path.read_bytes() for path in left.disk.parent.rglob("rank-1.ledger*")}
    left.went_on(STEPS, ("memory", "memory"))
    for path, old in then.items():
        path.unlink(missing_ok=True)
        path.write_bytes(old)
    plan = replace(left.plan, steps=MORE + 1, run_dir=left.plan.run_dir.with_name("back"))
    results = run_ranks(train, 2, plan, timeout=60)
    assert [each.resumed and each.resumed.step for each in results] == [MORE, MORE]


@pytest.mark.slow_cases("it is deleted")
@pytest.mark.parametrize("how", ["a bit of a tensor", "it is deleted"])
def test_without_a_readable_ledger_the_job_does_not_silently_start_over(left: Left, how: str):
    spoil([*left.memory.glob("*.ledger*"), *left.disk.glob("*.ledger*")], SPOIL[how])
    message = left.refused()
    assert "no rank could read its ledger, so none of them can be trusted" in message
    left.started_over(message)


def test_another_world_size_is_refused(left: Left):
    message = left.refused(4)
    assert "it is of world size 2, this job is of 4" in message


def test_another_mesh_is_refused(left: Left):
    message = left.refused(kind="fsdp")
    assert "session.resume(start_over=True)" in message
    assert "it is of mesh 'replica 2" in message
    assert "this job is of 'shard 2" in message


def test_a_job_that_does_not_resume_does_not_touch_what_is_there(left: Left):
    before = {path: path.read_bytes() for path in left.disk.rglob("*.shard")}
    results = left.again(resumes=False)
    for each in results:
        assert any("Call session.resume() before training" in failure for failure in each.failures)
    assert {path: path.read_bytes() for path in left.disk.rglob("*.shard")} == before
    left.went_on(STEPS, ("memory", "memory"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_bit_of_any_copy_is_noticed(left: Left, seed: int):
    chance = random.Random(seed)
    for rank in (0, 1):
        for path in left.copies(rank, STEPS):
            spoil([path], FlipFileBit(chance.random(), chance.randrange(8)))
    # If different tensors of the two ranks are damaged, each repairs the other's, and step 9 is whole again.
    results = left.again()
    step = results[0].resumed.step if results[0].resumed else None
    problems = [problem for each in results for problem in each.status["problems"]]
    repaired = any(f"state at step {STEPS} was replaced with identical bytes" in each for each in problems)
    assert step == (STEPS if repaired else STEPS - 1)
    for mine, theirs in zip(results, left.alone, strict=True):
        assert mine.bits == {each: theirs.bits[each] for each in range(step + 1, MORE + 1)}
        assert mine.failures == []
