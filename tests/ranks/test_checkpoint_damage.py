"""Checkpoints that were damaged, deleted or left by another job: never loaded, nor passed over silently.

One job was killed after nine steps with a check at every step: step 9, the latest, is in memory and in files,
step 8 in memory, step 7 in files. Each test spoils something of that, and starts the job again. All that may
be missing or damaged is in ``scenarios/test_retrieval``, without jobs.
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
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.storage.shard_format import Blob, decode, encode
from torchscout.checkpoint.storage.shards import inspect, verify
from torchscout.checkpoint.storage.shards import replace as replace_file
from torchscout.cli.main import app
from torchscout.faults.storage import Cut, Damage, FlipFileBit, copies, spoil

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

    def as_it_was(self) -> Left:
        """Undo all that was done to it."""
        there = self.disk.parent
        shutil.rmtree(there)
        shutil.copytree(there.with_name("whole"), there)
        return self

    def copies(self, rank: int, step: int) -> list[Path]:
        return copies([self.memory, self.disk], rank, step)

    def again(self, **changes: object) -> list[Result]:
        plan = replace(self.plan, steps=MORE, run_dir=self.plan.run_dir.with_name("again"), **changes)
        return run_ranks(train, 2, plan, timeout=60)

    def refused(self, **changes: object) -> str:
        """What every rank says when the job cannot go on."""
        with pytest.raises(RankError) as raised:
            self.again(**changes)
        message = str(raised.value)
        refusals = re.findall(r"^torchscout\.errors\.(?:Checkpoint|Unavailable)Error", message, re.MULTILINE)
        assert len(refusals) == 2, message
        return message

    def started_over(self, message: str) -> None:
        """The way out that every refusal names."""
        assert message.count("session.resume(start_over=True)") >= 2
        for mine, theirs in zip(self.again(start_over=True), self.alone, strict=True):
            assert mine.resumed is not None
            assert (mine.resumed.step, mine.resumed.role) == (0, None)
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
    kept.as_it_was()
    for rank in (0, 1):
        assert [len(kept.copies(rank, step)) for step in (9, 8)] == [2, 1], "what the tests count on"
    return kept


@dataclass(frozen=True)
class FlipTensorBit(Damage):
    """Of the largest tensor with this in its name."""

    part: str

    def happen(self, path: Path) -> None:
        header = inspect(path)
        entry = max((each for each in header.entries if self.part in each.name), key=lambda e: e.length)
        FlipFileBit((entry.offset + entry.length // 2) / header.size).happen(path)


class CopyWrongly(Damage):
    """As if a parameter had changed on the way from the device, before the digest of its copy was taken."""

    def happen(self, path: Path) -> None:
        header, tensors = decode(path.read_bytes())
        blobs = [
            Blob(each.name, each.dtype, each.shape, bytearray(tensors[each.name]), signature=each.signature)
            for each in header.entries
        ]
        parameter = max((each for each in blobs if each.name.endswith("/weight")), key=lambda b: len(b.data))
        parameter.data[len(parameter.data) // 2] ^= 1  # type: ignore[index]
        replace_file(path, encode(header.identity, header.role, header.document, blobs))
        assert verify(path).whole


OWN_STATE = FlipTensorBit("rng/torch")
"""Every rank's random state is different here, and no rank has a copy of another's."""


@pytest.mark.slow_cases("the end is missing")
@pytest.mark.parametrize(
    "damage",
    [pytest.param(FlipFileBit(0.6), id="a bit of a tensor"), pytest.param(Cut(0.9), id="the end is missing")],
)
def test_a_damaged_snapshot_is_not_loaded_and_its_file_is(left: Left, damage: Damage):
    lost = spoil(copies([left.memory], 1, STEPS), damage)
    problems = left.went_on(STEPS, ("memory", "disk"))
    assert lost.is_reported_in(problems), problems


def test_a_replicas_identical_tensor_takes_the_place_of_a_damaged_one(left: Left):
    """Every copy of rank 1's step 9 is damaged, and rank 0 has the same optimizer state."""
    lost = spoil(left.copies(1, STEPS), FlipTensorBit(".exp_avg"))
    problems = left.went_on(STEPS, ("memory", "memory"))
    assert lost.is_reported_in(problems), problems
    assert any("rank 1" in each and "identical bytes from rank 0" in each for each in problems)


def logged(rank: int, plan: Plan, logs: Path) -> Result:
    keep_log(logs, rank)
    return train(rank, plan)


def test_each_damaged_shard_is_logged_once(left: Left, tmp_path: Path):
    lost = spoil(left.copies(1, STEPS), FlipTensorBit("/weight"))
    plan = replace(left.plan, steps=STEPS, run_dir=tmp_path / "run")
    run_ranks(logged, 2, plan, tmp_path, timeout=60)
    lines, others = (lines_of(tmp_path, rank) for rank in (0, 1))
    assert [sum(str(path) in line for line in lines) for path in lost.paths] == [1, 1], lines
    assert not any("damaged" in line for line in others), others


def test_a_state_that_is_restored_otherwise_than_it_was_captured_is_not_trained_on(left: Left):
    # On both ranks alike, so that replicas agree.
    spoil([*left.copies(0, STEPS), *left.copies(1, STEPS)], CopyWrongly())
    for mine, theirs in zip(left.again(), left.alone, strict=True):
        assert mine.resumed is not None
        assert (mine.resumed.step, mine.resumed.role) == (STEPS - 1, TrustLevel.VERIFIED), mine.resumed
        assert mine.bits == {each: theirs.bits[each] for each in range(STEPS, MORE + 1)}
        assert mine.failures == []


def test_if_no_state_is_restored_as_it_was_captured_all_of_them_stay(left: Left):
    before = {path: path.read_bytes() for path in left.disk.parent.rglob("rank-1-*.shard")}
    spoil([*before], CopyWrongly())
    message = left.refused()
    assert "rank 1: the restored state is not what was saved: parameter" in message
    assert "rank 0: the restored" not in message
    for path, shard in before.items():
        path.chmod(0o600)
        path.write_bytes(shard)
    left.went_on(STEPS, ("memory", "memory"))


def test_damage_everywhere_is_reported_on_every_rank_and_nothing_is_loaded(left: Left):
    spoil([*left.memory.glob("step-*/rank-1-*"), *left.disk.glob("step-*/rank-1-*")], OWN_STATE)
    message = left.refused()
    assert "rank 1" in message
    left.started_over(message)


def test_a_damaged_ledger_is_reported(left: Left):
    spoil(list(left.memory.glob("rank-1.ledger*")), FlipFileBit(0.5))
    problems = left.went_on(STEPS, ("memory", "memory"))
    assert any("rank-1.ledger" in each for each in problems)


def test_without_a_readable_ledger_the_job_does_not_silently_start_over(left: Left):
    spoil([*left.memory.glob("*.ledger*"), *left.disk.glob("*.ledger*")], FlipFileBit(0.6))
    left.started_over(left.refused())


def test_another_mesh_is_refused(left: Left):
    message = left.refused(kind="fsdp")
    for fact in ("replica 2", "shard 2", "session.resume(start_over=True)"):
        assert fact in message


def test_a_job_that_does_not_resume_does_not_touch_what_is_there(left: Left):
    before = {path: path.read_bytes() for path in left.disk.rglob("*.shard")}
    results = left.again(resumes=False)
    for each in results:
        assert any("Call session.resume() before training" in failure for failure in each.failures)
    assert {path: path.read_bytes() for path in left.disk.rglob("*.shard")} == before
    left.went_on(STEPS, ("memory", "memory"))


@pytest.mark.slow
def test_any_bit_of_any_copy_is_noticed(left: Left):
    for seed in range(12):
        left.as_it_was()
        chance = random.Random(seed)
        for rank in (0, 1):
            for path in left.copies(rank, STEPS):
                spoil([path], FlipFileBit(chance.random(), chance.randrange(8)))
        # If different tensors of the two ranks are damaged, each repairs the other's, and step 9 is whole
        # again. A rank's random state has no second copy.
        results = left.again()
        assert results[0].resumed is not None
        step, reason = results[0].resumed.step, results[0].resumed.reason
        assert step == (STEPS - 1 if f"step {STEPS} cannot be had" in reason else STEPS), f"seed {seed}"
        problems = [problem for each in results for problem in each.status["problems"]]
        repaired = any(f"step {STEPS}" in each and "identical bytes" in each for each in problems)
        assert repaired or step == STEPS - 1, f"seed {seed}"
        for mine, theirs in zip(results, left.alone, strict=True):
            assert mine.bits == {each: theirs.bits[each] for each in range(step + 1, MORE + 1)}, (
                f"seed {seed}"
            )
            assert mine.failures == []
