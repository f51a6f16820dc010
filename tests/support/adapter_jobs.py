"""Small jobs of every framework, each with its adapter and a training step, for the contract of adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.replayed_job import Net, batch
from torchscout.adapters.base import Adapter
from torchscout.adapters.conformance import check_adapter
from torchscout.adapters.registry import adapter_for

Job = tuple[Any, Any, Callable[[], None]]
"""What a user gives to ``enable_resiliency``, and one training step."""


def ddp() -> Job:
    return _plain(DistributedDataParallel(Net()))


def fsdp() -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for layer in net.stack:
        fully_shard(layer, mesh=mesh)
    return _plain(fully_shard(net, mesh=mesh))


def accelerated() -> Job:
    import os

    from accelerate import Accelerator

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    net = Net()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return _plain(model, optimizer)


def megatron() -> Job:
    from tests.support import megatron_jobs

    job = megatron_jobs.build(megatron_jobs.Trial(sharded=True, dtype="bfloat16"))
    return job.chunks, job.optimizer, lambda: megatron_jobs.one_step(job)


def deepspeed() -> Job:
    return _deepspeed(2)


def deepspeed_sharded() -> Job:
    return _deepspeed(3)


def titan() -> Job:
    import tempfile

    from tests.support import titan_jobs

    folder = Path(tempfile.mkdtemp())
    titan_jobs.make_assets(folder)
    trial = titan_jobs.Trial(folder)
    titan_jobs._begin(trial)
    trainer = titan_jobs.config_of(trial).build()
    batches = trainer.batch_generator(trainer.dataloader)
    return trainer, None, lambda: trainer.train_step(batches)


def _deepspeed(stage: int) -> Job:
    from tests.support.checkpoint_jobs import Loader
    from tests.support.deepspeed_jobs import Plan, work_of

    work = work_of(Plan(stage, bf16=True), dist.get_rank())
    batches = iter(Loader(work.replica))
    return work.engine, None, lambda: work.step(next(batches), lambda: None)


def _plain(model: Any, optimizer: Any = None) -> Job:
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = iter(range(100))

    def step() -> None:
        tokens, targets = batch(next(places), dist.get_rank())
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def promises(
    _: int, make: Callable[[], Job], broken: Callable[[Adapter], Adapter] | None = None
) -> list[str]:
    """What the adapter of this job does not keep, on one rank; ``broken`` makes a worse one of it."""
    model, optimizer, step = make()
    adapter = adapter_for(model, optimizer, None)
    return check_adapter(adapter if broken is None else broken(adapter), step)


def with_package(rank: int, folder: Path, run_dir: Path) -> dict[str, Any]:
    """A job of a framework whose adapter an installed package brings."""
    sys.path.insert(0, str(folder))
    from torchscout.attach import enable_resiliency
    from toy_engine import Engine

    torch.manual_seed(0)
    engine = Engine(Net())
    found = adapter_for(engine, None, None)
    broken = check_adapter(found, lambda: engine.learn(*batch(0, rank)))
    session = enable_resiliency(engine, run_dir=run_dir, observer=None)
    engine.learn(*batch(1, rank))
    peers = session.status()["replay"]["peers"]
    session.close()
    return {"adapter": type(found).__name__, "broken": broken, "step": session.step, "peers": peers}
