"""Slow ranks and slow process groups, and not those that wait for them (paper, section 6.1.2)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.findings import Findings, findings_of
from tests.support.ranks import run_ranks
from tests.support.replayed_job import Found, Net, checked_training, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import BaselineConfig, ReplayConfig
from torchscout.decision.records.record import EvidenceRecord
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh, MeshAddress

ALL = None
"""Every pass over a place, training's own and replay's."""


SLOW = range(4, 10)
"""The steps in which a planned delay happens."""
SHARDS, TENSORS = ("all_gather@mesh_dp_shard", "shard"), ("all_reduce@mesh_tp", "tensor")


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in the order of the paper's figure: tensor-parallel slices, then replicas, then shards."""

    replica: int
    shard: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.replica * self.shard * self.tensor

    def mesh(self) -> Mesh:
        """Return a mesh in which the tensor-parallel ranks of one replica and shard share a machine."""
        places = [
            (tensor, replica, shard)
            for tensor in range(self.tensor)
            for replica in range(self.replica)
            for shard in range(self.shard)
        ]
        addresses = [MeshAddress(replica=d, shard=s, tensor=t) for t, d, s in places]
        return Mesh(addresses, [f"machine-{d}-{s}" for _, d, s in places])

    def devices(self) -> DeviceMesh:
        return init_device_mesh(
            "cpu",
            (self.tensor, self.replica, self.shard),
            mesh_dim_names=("tp", "dp_replicate", "dp_shard"),
        )


@dataclass(frozen=True)
class Result(Findings):
    """The result of one rank."""

    @property
    def stragglers(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return scope, ranks and step of each incident; fail on any other kind."""
        assert {each.manifestation.value for each in self.incidents} <= {"straggler"}, self.sentences
        return [(each.scope.value, each.ranks, each.step) for each in self.incidents]

    @property
    def sentences(self) -> list[str]:
        return [each.sentence for each in self.incidents]


def train(rank: int, layout: Layout, faults: FaultPlan, steps: int, run_dir: Path) -> Result:
    """Train with a check at every step."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    net, devices = Net(), layout.devices()
    for block in net.stack:
        if layout.tensor > 1:
            parallelize_module(block, devices["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=devices["dp_replicate", "dp_shard"])
    fully_shard(net, mesh=devices["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    with Injector(faults, rank, net, optimizer) as injector:
        session = enable_resiliency(
            net,
            optimizer,
            replay=ReplayConfig(interval=1, records="all"),
            observer=None,
            parallelism=layout.mesh(),
            run_dir=run_dir,
        )
        row = rank % (layout.replica * layout.shard)
        for step in range(1, steps + 1):
            loss = loss_of(net, step, row)  # tensor-parallel ranks see the same
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Result(fired=len(injector.fired), **findings_of(session))


def slow_layers(faults: FaultPlan, rank: int, at: str, steps: range = SLOW) -> FaultPlan:
    for layer in (0, 1):
        faults = faults.delay(rank=rank, at=f"stack.{layer}/{at}", step=steps, seconds=0.25, calls=ALL)
    return faults


def slow_link(faults: FaultPlan, at: tuple[str, str], ranks: Sequence[int], steps: range = SLOW) -> FaultPlan:
    """All members are slow in every such collective; where one alone is, its whole group waits for it."""
    place, axis = at
    return faults.slow_collective(ranks=ranks, at=place, axis=axis, step=steps, seconds=0.25)


def incidents_of(found: list[Found]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [
        (each.manifestation.value, each.scope.value, each.ranks, each.step) for each in found[0].incidents
    ]


@pytest.mark.slow_cases("forward")
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_slow_layer_names_its_rank_after_two_rounds(at: str, tmp_path: Path):
    faults = slow_layers(FaultPlan(), 2, at)
    found = run_ranks(checked_training, 4, faults, 8, [], tmp_path, timeout=120)
    assert len(found[2].fired) >= 2 * 5  # training's own pass and the replayed one, in each of five steps
    (incident,) = found[0].incidents
    (truth,) = faults.truth(Mesh.grid(replica=4))
    assert truth.ranks == (2,)
    assert truth.matches(incident), incident.sentence
    assert {each.surface for each in incident.records} == {truth.surface}
    # Two rounds, and perhaps one between or after them in which the machine held another rank up.
    assert sorted(each.step for each in incident.records) in ([4, 5], [4, 6], [5, 6], [4, 5, 6])


def test_a_delay_that_happens_once_is_not_reported(tmp_path: Path):
    faults = slow_layers(FaultPlan(), 2, "forward", range(4, 5))
    found = run_ranks(checked_training, 4, faults, 8, [], tmp_path, timeout=120)
    assert len(found[2].fired) >= 2
    assert incidents_of(found) == []
    times = [each for each in found[0].times if (each.surface, each.step) == ("time/module", 4)]
    assert [each.ranks for each in times] == [(2,)]  # seen, and not held against it


def test_a_slow_one_of_two_replicas_is_reported_as_a_pair(tmp_path: Path):
    faults = slow_layers(FaultPlan(), 1, "forward")
    found = run_ranks(checked_training, 2, faults, 8, [], tmp_path, timeout=120)
    ((*what, step),) = incidents_of(found)
    assert what == ["straggler", "peer_group", (0, 1)], found[0].incidents
    assert step in SLOW  # on a busy machine, a round before may have been slow by chance


@pytest.mark.long
def test_a_slowdown_of_all_ranks_has_job_scope(tmp_path: Path):
    faults = FaultPlan()
    for rank in range(3):
        faults = slow_layers(faults, rank, "forward", range(8, 19))
    config = ReplayConfig(interval=1, recipes=("layer",), baseline=BaselineConfig(warmup=5))
    found = run_ranks(checked_training, 3, faults, 18, [], tmp_path, config, timeout=120)
    ((*what, step),) = incidents_of(found)
    assert what == ["straggler", "job", ()], found[0].incidents
    assert 10 <= step <= 18  # on a busy machine, ranks may differ too much for some rounds to count


@pytest.mark.long
def test_a_rank_that_waits_for_a_slow_tensor_parallel_rank_is_not_named(tmp_path: Path):
    layout = Layout(replica=3, shard=1, tensor=2)
    faults = slow_layers(FaultPlan(), 4, "forward")
    found: list[Result] = run_ranks(train, layout.ranks, layout, faults, 6, tmp_path, timeout=240)
    assert found[4].fired
    ((*what, step),) = found[0].stragglers
    assert what == ["rank", (4,)], found[0].sentences
    assert step in SLOW
    assert [each.failures for each in found] == [[]] * 6


@pytest.mark.long_cases("shard group")
@pytest.mark.parametrize(
    ("layout", "at", "rank", "ranks"),
    [
        (Layout(replica=3, shard=2), SHARDS, 3, (2, 3)),
        pytest.param(Layout(replica=3, shard=1, tensor=2), TENSORS, 1, (1, 4), marks=pytest.mark.slow),
    ],
    ids=["shard group", "tensor group"],
)
def test_a_slow_collective_names_its_process_group(
    layout: Layout, at: tuple[str, str], rank: int, ranks: tuple[int, ...], tmp_path: Path
):
    faults = slow_link(FaultPlan(), at, [rank], range(4, 6))
    found: list[Result] = run_ranks(train, layout.ranks, layout, faults, 7, tmp_path, timeout=240)
    assert found[rank].fired
    ((_, named, step),) = found[0].stragglers
    assert (named, step) == (ranks, 5), found[0].sentences
    (truth,) = faults.truth(layout.mesh())
    assert truth.matches(found[0].incidents[0]), (truth, found[0].sentences)
    for each in found:
        assert each.failures == []
        assert {record.step for record in each.records if _is_slow(record)} <= {4, 5}  # the next are clean
        assert {record.status for record in each.records if record.manifestation.value == "sdc"} == {"agree"}


def _is_slow(record: EvidenceRecord) -> bool:
    """Whether a collective took a quarter of a second."""
    return record.surface.startswith("time/all_") and max(record.verdict.evidence) > 200


PAPER = Layout(replica=4, shard=2, tensor=2)
"""Sixteen ranks: the paper's figure of a slow machine."""


def sixteen(faults: FaultPlan, run_dir: Path) -> Result:
    found = run_ranks(train, PAPER.ranks, PAPER, faults, 7, run_dir, timeout=400)
    assert [each.failures for each in found] == [[]] * 16
    assert {rank for rank, each in enumerate(found) if each.fired} == {each.rank for each in faults}
    for truth, incident in zip(faults.truth(PAPER.mesh()), found[0].incidents, strict=True):
        assert truth.matches(incident), (truth, incident.sentence)
    return found[0]


@pytest.mark.slow
def test_slow_groups_that_meet_on_a_machine_name_it(tmp_path: Path):
    faults = slow_link(slow_link(FaultPlan(), SHARDS, (4, 5)), TENSORS, (4, 12))
    found = sixteen(faults, tmp_path)
    assert found.stragglers == [("machine", (4, 12), 5)], found.sentences
    assert found.incidents[0].hosts == ("machine-2-0",)
    assert "a machine fault" in found.sentences[0]


@pytest.mark.slow
def test_a_slow_tensor_parallel_group_alone_is_inside_its_machine(tmp_path: Path):
    found = sixteen(slow_link(FaultPlan(), TENSORS, (4, 12)), tmp_path)
    assert found.stragglers == [("machine", (4, 12), 5)], found.sentences
    assert "a fault inside machine-2-0" in found.sentences[0]


@pytest.mark.slow
def test_slow_shard_groups_alone_name_the_network(tmp_path: Path):
    faults = slow_link(slow_link(FaultPlan(), SHARDS, (4, 5)), SHARDS, (12, 13))
    found = sixteen(faults, tmp_path)
    assert [(scope, ranks) for scope, ranks, _ in found.stragglers] == [("process_group", (4, 5, 12, 13))]
    assert "the network between machine-2-0 and machine-2-1" in found.sentences[0]


@pytest.mark.slow
def test_groups_that_are_slow_everywhere_have_job_scope(tmp_path: Path):
    faults = FaultPlan()
    for group in ((0, 8), (2, 10), (5, 13)):
        faults = slow_link(faults, TENSORS, group)
    found = sixteen(faults, tmp_path)
    assert [scope for scope, _, _ in found.stragglers] == ["job"], found.sentences
