"""Runs the jobs of ``test_checks``: as threads of this process, or as real ranks over Gloo.

Both train the same net with the same faults, and both have the real recipes of checks.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.scenarios.rows import Finding
from tests.scenarios.today.corruption import finding_of
from tests.scenarios.today.programs import PROGRAMS, Net, Program, RefusesHooks
from tests.scenarios.today.thread_ranks import UNTIMED, Links, Rank, on_every_rank
from tests.support.ranks import run_ranks
from tests.support.replayed_job import REPLAY
from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.adapters.recipe_builder import RecipeBuilder, table_of
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.types import Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

if TYPE_CHECKING:
    from tests.scenarios.test_checks import Job

THREADS = {
    "replicas": ("layer", "optimizer", "replicated_state", "owned_state"),
    "owners": ("optimizer", "replicated_state"),  # a layer needs the weights that FSDP gathers
}
"""The layouts whose ranks are threads, and what is checked there."""
SITES = {
    "weight": "stack.0.up/weight",
    "average": "stack.0.up/weight.exp_avg",
    "buffer": "stack.0/table",
    "update": "tokens/weight",
    "output": "stack.0/output",
    "output once": "stack.0/output",
    "gradient": "stack.0.up/weight.gradient",
}
CALLS = {"output": REPLAY, "output once": range(1, 2), "gradient": REPLAY}
"""The calls within a step that a fault hits, if not training's own."""
SMALL, LARGE = (8, 16, (3, 5)), (256, 1024, (16, 5))
"""Width, number of words and shape of a batch. Only from some size on, a GPU has other kernels for tensors at
odd addresses."""
BIT, TIME_LIMIT = 20, 5.0


class _Seen(NamedTuple):
    """What one rank has seen."""

    findings: list[Finding]
    certified: bool
    waited: bool
    happened: int
    """Faults, and what the program does."""


def concluded(job: Job) -> tuple[list[Finding], bool, bool]:
    """Return what is reported, whether the state after the last step is certified, and whether ranks had to
    wait for a time limit."""
    if job.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if job.layout in THREADS:
        mesh = Mesh.grid(**{"replica" if job.layout == "replicas" else "shard": job.ranks})
        seen = on_every_rank(mesh, lambda links: _as_thread(links, mesh, job), torch.device(job.device))
    else:
        with tempfile.TemporaryDirectory() as folder:
            seen = run_ranks(_as_process, job.ranks, job, Path(folder))
    if job.flips or PROGRAMS[job.program] is not Program:
        assert any(each.happened for each in seen)
    findings, certified, *_ = seen[0]
    assert all((each.findings, each.certified) == (findings, certified) for each in seen)
    return findings, certified, any(each.waited for each in seen)


def _as_thread(links: Links, mesh: Mesh, job: Job) -> _Seen:
    recipes = THREADS[job.layout]
    config = ReplayConfig(interval=job.every, recipes=recipes, require=tuple(job.require), **UNTIMED)
    undo = ExitStack()

    def attach(net: nn.Module, optimizer: torch.optim.Optimizer) -> Rank:
        adapter = PyTorchAdapter(net, [optimizer], mesh)
        table = table_of(adapter)
        builder = RecipeBuilder(adapter, table, config, mesh, links.rank, links)
        built = builder.recipes(adapter.structure(), (), None)
        rank = Rank(links, mesh, built, config, [*net.parameters()], table)
        undo.callback(adapter.hook_updates(rank.driver.update_begins, rank.step_finished))
        return rank

    def average(net: nn.Module) -> None:
        for each in net.parameters() if job.layout == "replicas" else ():
            payloads = links.gather(each.grad.cpu().numpy().tobytes())
            every = [torch.frombuffer(bytearray(payload), dtype=each.dtype) for payload in payloads]
            each.grad.copy_(torch.stack(every).mean(0).view_as(each))

    rank, happened = _trained(job, links.rank, lambda net: net.to(links.device), attach, average)
    undo.close()
    certified = rank.driver.certified_step == job.steps
    rank.driver.close()
    assert rank.boundary.failures == []
    return _Seen([finding_of(each) for each in rank.corruption], certified, False, happened)


def _as_process(rank: int, job: Job, run_dir: Path) -> _Seen:
    warnings.filterwarnings("ignore", message=".*view tensor.*")  # of FSDP, about this net

    def wrap(net: Net) -> nn.Module:
        if job.layout == "DDP":
            return DistributedDataParallel(net)
        mesh = init_device_mesh("cpu", (job.ranks,))  # also where there is a GPU
        for each in (*net.stack, net):
            fully_shard(each, mesh=mesh)
        return net

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        replay = ReplayConfig(
            interval=job.every, require=tuple(job.require), timeout_seconds=TIME_LIMIT, **UNTIMED
        )
        return enable_resiliency(model, optimizer, replay=replay, observer=None, run_dir=run_dir)

    session, happened = _trained(job, rank, wrap, attach, lambda _: None)
    dist.barrier()  # the rank that reports an incident has written it
    found = [finding_of(each) for each in session.incidents if each.manifestation is Manifestation.SDC]
    certified = session.certified_step == job.steps
    session.close()
    waited = any("Timed out" in each for each in session.failures)
    assert session.failures == [] or PROGRAMS[job.program] is RefusesHooks
    return _Seen(found, certified, waited, happened)


def _trained(
    job: Job,
    rank: int,
    wrap: Callable[[Net], nn.Module],
    attach: Callable[[nn.Module, torch.optim.Optimizer], Any],
    average: Callable[[nn.Module], None],
) -> tuple[Any, int]:
    """Train with the faults of the job; return what ``attach`` has returned, and how much has happened."""
    program: Program = PROGRAMS[job.program](rank, job.steps)
    width, words, batch = SMALL if job.device == "cpu" else LARGE
    torch.manual_seed(rank if job.layout == "owners" else 0)
    net = Net(program, width, words)
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    program.begin(model, net, optimizer)
    # In an update: after its arithmetic, and before the check. Other state: after the check, at rest.
    with Injector(_plan(job, in_update=True), rank, net, optimizer) as early:
        attached = attach(model, optimizer)
        with Injector(_plan(job, in_update=False), rank, net, optimizer) as late:
            for step in range(1, job.steps + 1):
                drawn = torch.Generator().manual_seed(100 * step + rank)
                text = torch.randint(words, batch, generator=drawn).to(job.device)
                optimizer.zero_grad()
                with program.forward():
                    scores = model(text[:, :-1])
                nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
                average(net)
                program.update(optimizer)
                program.updated(net, step)
    assert [*early.unfired, *late.unfired] == []
    return attached, program.happened + len(early.fired) + len(late.fired)


def _plan(job: Job, *, in_update: bool) -> FaultPlan:
    plan = FaultPlan()
    for rank, what, step in job.flips:
        if (what == "update") is in_update:
            calls = CALLS.get(what, range(1))
            plan = plan.flip_bit(rank=rank, at=SITES[what], step=step, bit=BIT, calls=calls)
    return plan
