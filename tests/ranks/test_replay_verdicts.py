"""Whom replay names and in which words: majorities, second replays, what lasts, what is no corruption.

Which places a corruption is seen at is the matrix's affair.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from tests.support.replay_jobs import GridJob, Job, differing, records
from tests.support.replayed_job import REPLAY, WIDTH, Block, Found, Net, checked_training
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

WEIGHT = "stack.0.up/weight"
STEPS, FAULTY_STEP = 5, 3
"""At odd steps ``stack.0`` is replayed, where every step is checked."""
SLOW = pytest.mark.slow


def trained(
    ranks: int,
    faults: FaultPlan,
    run_dir: Path,
    *,
    steps: int = STEPS,
    mended: Sequence[tuple[int, int]] = (),
) -> list[Found]:
    """One job; every fault has happened, nothing of SCOUT has failed, and all ranks have seen the same."""
    found = run_ranks(checked_training, ranks, faults, steps, mended, run_dir, timeout=90)
    for result in found:
        assert (result.failures, result.unfired) == ([], 0)
        assert result.incidents == found[0].incidents
        assert outcomes(result) == outcomes(found[0])
    return found


def outcomes(result: Found) -> list[tuple[int, str, str, tuple[int, ...]]]:
    return [(each.step, each.surface, each.status, each.ranks) for each in result.records]


def corrupted(*values: tuple[int, float]) -> FaultPlan:
    """The same weight, on each of these ranks, becomes that value."""
    faults = FaultPlan()
    for rank, value in values:
        faults = faults.set_value(rank=rank, at=WEIGHT, step=FAULTY_STEP, value=value)
    return faults


def test_two_replicas_are_both_listed_and_nobody_is_blamed(tmp_path: Path):
    (incident,) = trained(2, corrupted((1, 3.0)), tmp_path)[0].incidents
    assert (incident.manifestation, incident.scope) == (Manifestation.SDC, Scope.PEER_GROUP)
    assert (incident.ranks, incident.step, incident.action) == ((0, 1), FAULTY_STEP, Action.INSPECT)
    assert "Ranks 0 and 1" in incident.sentence
    assert "no majority says who is right" in incident.sentence
    assert all(record.ranks == () for record in incident.records)


@pytest.mark.parametrize(
    "values",
    [pytest.param((3.0, 3.0), id="the same"), pytest.param((3.0, 4.0), id="another one", marks=SLOW)],
)
def test_two_of_five_with_a_wrong_value_are_both_named(tmp_path: Path, values: tuple[float, float]):
    faults = corrupted((1, values[0]), (4, values[1]))
    (incident,) = trained(5, faults, tmp_path)[0].incidents
    assert (incident.ranks, incident.step) == ((1, 4), FAULTY_STEP)
    assert incident.scope is Scope.MACHINE, "all ranks of this test share a machine"
    assert "3 of 5 peers agree against them" in incident.sentence


def test_two_of_five_that_fail_at_different_places_are_two_incidents(tmp_path: Path):
    faults = corrupted((1, 3.0)).set_value(rank=4, at="head/bias", step=FAULTY_STEP, value=3.0)
    incidents = trained(5, faults, tmp_path)[0].incidents
    named = {incident.ranks: incident for incident in incidents}
    assert named.keys() == {(1,), (4,)}
    assert len(incidents) == 2
    assert WEIGHT in named[1,].sentence
    assert "head/bias" in named[4,].sentence


def test_two_against_two_is_inconclusive(tmp_path: Path):
    found = trained(4, corrupted((1, 3.0), (2, 3.0)), tmp_path)
    (incident,) = found[0].incidents
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1, 2, 3))
    assert incident.action is Action.INSPECT
    of_weight = [each for each in found[0].records if each.surface == WEIGHT]
    assert {each.status for each in of_weight} == {"inconclusive"}


def test_a_rank_that_repeats_its_mistake_is_named_in_the_same_check(tmp_path: Path):
    faults = FaultPlan().set_value(rank=2, at="stack.0/output", step=FAULTY_STEP, value=9.0, calls=REPLAY)
    (incident,) = trained(4, faults, tmp_path)[0].incidents
    assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (2,), FAULTY_STEP)
    assert "further replays gave the same (persistent)" in incident.sentence
    assert "the weights agree, only the computation differs" in incident.sentence


def test_a_rank_that_is_wrong_in_every_other_replay_is_named_when_chance_is_excluded(tmp_path: Path):
    """Half of 64 replays are not enough among four peers; those of the layer's next turn are added."""
    every_other, steps = REPLAY[::2], range(FAULTY_STEP, STEPS + 1)
    faults = FaultPlan().set_value(rank=2, at="stack.0/output", step=steps, value=9.0, calls=every_other)
    found = trained(4, faults, tmp_path)[0]
    (incident,) = found.incidents
    assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (2,), STEPS)
    assert "32 in earlier checks (intermittent)" in incident.sentence
    (before,) = [each for each in found.records if each.surface == "stack.0/output" and each.reason]
    assert before.step == FAULTY_STEP
    assert before.reason.startswith("undecided: rank 2 differed 32 times in 64 replays")


def test_a_single_wrong_replay_names_nobody(tmp_path: Path):
    once = range(1, 2)
    faults = FaultPlan().set_value(rank=2, at="stack.0/output", step=FAULTY_STEP, value=9.0, calls=once)
    found = trained(4, faults, tmp_path)[0]
    assert found.incidents == []
    first: dict[int, str] = {}
    for each in found.records:
        if each.surface == "stack.0/output":
            first.setdefault(each.step, each.status)  # then come the further replays
    assert first == {1: "agree", 3: "not_checked", 5: "agree"}


def test_a_wrong_weight_is_reported_as_held_and_not_only_computed(tmp_path: Path):
    (incident,) = trained(4, corrupted((2, 3.0)), tmp_path)[0].incidents
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert "the state itself differs, not only what is computed from it" in incident.sentence
    assert "(persistent)" in incident.sentence


class Restless(Block):
    """Draws from a source that no seed governs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (drawn,) = struct.unpack("<Q", os.urandom(8))
        return super().forward(x) * (1 + drawn / 2**64 if self.training else 1)


def restless_job(rank: int, run_dir: Path) -> tuple[list[Incident], list[EvidenceRecord], dict]:
    net = Net()
    net.stack = nn.ModuleList([Restless(), Restless()])
    job = Job(rank, net)
    with job.attach(run_dir) as session:
        job.train(4)
        assert session.failures == []
        return session.incidents, records(run_dir, rank), session.status()["replay"]


def test_a_layer_that_never_repeats_itself_is_no_corruption(tmp_path: Path):
    for incidents, found, status in run_ranks(restless_job, 3, tmp_path, timeout=90):
        assert incidents == []
        assert "nondeterministic kernel" in status["not_checked"]["stack.0/output"]
        unchecked = {each.surface: each for each in found if each.step == 3 and each.reason is not None}
        assert "ranks 0, 1 and 2 did not repeat the same numbers" in unchecked["stack.0/output"].reason
        quiet = {each.status for each in found if each.surface in ("stack.0/parameters", "head/output")}
        assert quiet == {"agree"}


def test_a_wrong_weight_is_reported_once_and_again_when_it_comes_back(tmp_path: Path):
    faults = corrupted((2, 3.0)).set_value(rank=2, at=WEIGHT, step=10, value=4.0)
    found = trained(4, faults, tmp_path, steps=12, mended=[(7, 0)])
    assert [(incident.step, incident.ranks) for incident in found[0].incidents] == [(3, (2,)), (10, (2,))]
    wrong = [each.step for each in found[0].records if each.surface == WEIGHT and each.ranks == (2,)]
    assert set(wrong) == {3, 4, 5, 6, 7, 10, 11, 12}, "the records go on saying so"


CONTRACT = {"schema", "kind", "time", "step", "manifestation", "scope", "ranks", "hosts"}
CONTRACT |= {"surface", "status", "peers", "bitmap", "action", "sentence"}


def test_one_rank_writes_the_incident_and_every_rank_its_records(tmp_path: Path):
    trained(4, corrupted((0, 3.0)), tmp_path)
    line, decision = [json.loads(each) for each in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert (decision["kind"], decision["is_carried_out"]) == ("decision", False)
    assert line.keys() >= CONTRACT
    assert (line["kind"], line["manifestation"], line["scope"]) == ("incident", "sdc", "rank")
    assert (line["ranks"], line["peers"], line["bitmap"]) == ([0], [0, 1, 2, 3], [1, 0, 0, 0])
    assert (line["status"], line["action"]) == ("attributed", "replace_machine")
    assert len(line["hosts"]) == 1
    written = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert written == [f"rank-{rank}.jsonl" for rank in range(4)]
    for path in (tmp_path / "records").iterdir():
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        assert lines
        assert all(each.keys() >= CONTRACT for each in lines)


def job_with_callback(rank: int, run_dir: Path) -> list[tuple[str, tuple[int, ...]]]:
    reported: list[tuple[str, tuple[int, ...]]] = []
    job = Job(rank)
    with (
        Injector(corrupted((1, 3.0)), rank, job.net, job.optimizer),
        job.attach(run_dir, on_incident=lambda each: reported.append((each.manifestation.value, each.ranks))),
    ):
        job.train(STEPS)
        torch.distributed.barrier()
    return reported


def test_the_users_callback_is_called_for_corruption_on_every_rank(tmp_path: Path):
    assert run_ranks(job_with_callback, 3, tmp_path, timeout=90) == [[("sdc", (1,))]] * 3


def grid_job(rank: int, faults: FaultPlan, run_dir: Path) -> tuple[list[Incident], list[EvidenceRecord]]:
    job = GridJob()
    with Injector(faults, rank, job.net, job.optimizer) as injector:
        session = job.attach(run_dir, ReplayConfig(interval=1, recipes=("replicated_state", "layer")))
        job.train(4)
        torch.distributed.barrier()
        incidents = session.incidents
        assert (injector.unfired, session.failures) == ([], [])
        session.close()
    return incidents, records(run_dir, rank)


def test_a_clean_grid_of_replicas_and_tensor_shards_is_silent(tmp_path: Path):
    for rank, (incidents, found) in enumerate(run_ranks(grid_job, 8, FaultPlan(), tmp_path, timeout=120)):
        assert incidents == []
        peers = tuple(range(rank % 2, 8, 2))
        assert {(each.status, each.peers) for each in found} == {("agree", peers)}
        assert {"stack.0/output", "stack.1/output", "state/parameters"} <= {each.surface for each in found}


@pytest.mark.parametrize(
    ("step", "bit"),
    [
        pytest.param(2, 0, id="beside the replayed layer"),
        pytest.param(3, 30, id="in the replayed layer", marks=SLOW),
    ],
)
def test_one_flipped_bit_in_a_tensor_shard_is_named_exactly(tmp_path: Path, step: int, bit: int):
    faults = FaultPlan().flip_bit(rank=5, at=WEIGHT, step=step, bit=bit)
    results = run_ranks(grid_job, 8, faults, tmp_path, timeout=120)
    (incident,) = results[0][0]
    assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (5,), step), incident.sentence
    assert incident.records[0].peers == (1, 3, 5, 7)
    for rank, (_, found) in enumerate(results):
        named = set(differing(found).values())
        assert named == ({(5,)} if rank % 2 else set()), f"rank {rank}: {differing(found)}"


@SLOW
def test_a_wrong_partial_result_names_all_who_compute_with_it_once(tmp_path: Path):
    """Tensor-parallel ranks add their results up: whose was wrong cannot be seen in the sum."""
    faults = FaultPlan().flip_bit(
        rank=5, at="stack.0.up/output", step=3, bit=22, index=3, calls=range(1, 200)
    )
    results = run_ranks(grid_job, 8, faults, tmp_path, timeout=120)
    for incidents, _ in results:
        (incident,) = incidents
        assert (incident.ranks, incident.step) == ((4, 5), 3), incident.sentence
        assert incident.scope is Scope.MACHINE  # here; the process group's, were they on two
        assert "they compute together" in incident.sentence


def arbitrary_names_job(rank: int, names: Sequence[str], run_dir: Path) -> tuple[list[Incident], set[str]]:
    """Modules under any name, batches of each rank's own size and length."""
    torch.manual_seed(0)
    words, blocks, out = names
    net = nn.ModuleDict(
        {words: nn.Embedding(24, WIDTH), blocks: nn.ModuleList([Block(), Block()]), out: nn.Linear(WIDTH, 24)}
    )
    job = Job(rank, Spelled(net, names))
    with job.attach(run_dir, ReplayConfig(interval=1, variants=(0.1, 1.0))) as session:
        for step in range(1, 6):
            tokens = torch.randint(24, (1 + (rank + step) % 3, 3 + (2 * rank + step) % 5))
            job.optimizer.zero_grad()
            job.model(tokens).square().mean().backward()
            job.optimizer.step()
        assert session.failures == []
        return session.incidents, {each.status for each in records(run_dir, rank)}


class Spelled(nn.Module):
    def __init__(self, parts: nn.ModuleDict, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words, blocks, out = (getattr(self, name) for name in self.names)
        x = words(tokens)
        for block in blocks:
            x = block(x)
        return out(x)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("a", "b", "c"), marks=SLOW),
        ("output", "embedding", "layers"),
        ("module_", "état", "x/y z"),
    ],
)
def test_batches_and_names_of_any_kind_are_no_corruption(tmp_path: Path, names: tuple[str, str, str]):
    for incidents, statuses in run_ranks(arbitrary_names_job, 3, names, tmp_path, timeout=90):
        assert incidents == []
        assert statuses == {"agree"}


def clean_job(rank: int, seed: int, run_dir: Path) -> tuple[list[Incident], list[str], set[str]]:
    width, layers, size = 8 * (1 + seed % 4), 1 + seed % 3, 1 + seed % 5
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers + 1)))
    job = Job(rank, net)
    config = ReplayConfig(interval=1, variants=(0.1, 1.0, 10.0))
    with job.attach(run_dir, config) as session:
        for _ in range(6):
            job.optimizer.zero_grad()
            job.model(torch.randn(size + rank, width) * 10.0 ** (seed % 7 - 3)).square().mean().backward()
            job.optimizer.step()
        found = records(run_dir, rank)
        return session.incidents, session.failures, {each.status for each in found}


@SLOW
@pytest.mark.parametrize("seed", range(30))
def test_thirty_runs_without_a_fault_are_silent(tmp_path: Path, seed: int):
    for incidents, failures, statuses in run_ranks(clean_job, 3, seed, tmp_path, timeout=90):
        assert (incidents, failures, statuses) == ([], [], {"agree"})
