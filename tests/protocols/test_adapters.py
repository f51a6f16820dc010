"""Every adapter keeps what ``Adapter`` promises on a real job of its framework; broken ones are reported."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Net, batch
from torchscout.adapters.base import Adapter
from torchscout.adapters.conformance import check_adapter
from torchscout.adapters.registry import adapter_for
from torchscout.errors import ScoutError

Job = tuple[Any, Any, Callable[[], None]]
"""What a user gives to ``enable_resiliency``, and one training step."""


EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "own_adapter"


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
    from evaluation.jobs.megatron import Setup, build, one_step

    built, steps = build(Setup(sharded=True, dtype="bfloat16")), itertools.count(1)
    return built.chunks, built.optimizer, lambda: one_step(built, next(steps))


def deepspeed() -> Job:
    return _deepspeed(2)


def deepspeed_sharded() -> Job:
    return _deepspeed(3)


def titan() -> Job:
    from evaluation.jobs import titan

    titan.prepare()
    trainer = titan.config_of(titan.Setup()).build()
    batches = trainer.batch_generator(trainer.dataloader)
    return trainer, None, lambda: trainer.train_step(batches)


def _deepspeed(stage: int) -> Job:
    from evaluation.jobs.deepspeed import Setup, build

    built, steps = build(Setup(stage, bf16=True), dist.get_rank()), itertools.count(1)
    return built.engine, None, lambda: built.step(next(steps))


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


@pytest.mark.parametrize(
    "job",
    [
        ddp,
        fsdp,
        accelerated,
        megatron,
        deepspeed,
        deepspeed_sharded,
        titan,
    ],
    ids=lambda job: job.__name__,
)
def test_an_adapter_keeps_its_promises(job: Callable[[], Job]):
    assert run_ranks(promises, 2, job, timeout=120) == [[], []]


class Worse:
    """An adapter with one thing done otherwise."""

    def __init__(self, adapter: Adapter, name: str, otherwise: object) -> None:
        self._adapter, self._name, self._otherwise = adapter, name, otherwise

    def __getattr__(self, name: str) -> object:
        return self._otherwise if name == self._name else getattr(self._adapter, name)


def too_often(adapter: Adapter) -> Worse:
    def hook_updates(before, after):
        leaving = [adapter.hook_updates(before, after), adapter.hook_updates(before, after)]
        return lambda: [each() for each in leaving]

    return Worse(adapter, "hook_updates", hook_updates)


def too_early(adapter: Adapter) -> Worse:
    def hook_updates(before, after):
        def both():
            before()
            after()

        return adapter.hook_updates(both, lambda: None)

    return Worse(adapter, "hook_updates", hook_updates)


def too_few(adapter: Adapter) -> Worse:
    return Worse(adapter, "parameters", lambda: dict([*adapter.parameters().items()][1:]))


def too_strange(adapter: Adapter) -> Worse:
    import torch

    return Worse(adapter, "layers", lambda: [torch.nn.Linear(1, 1)])


def too_different(adapter: Adapter) -> Worse:
    import torch.distributed as dist

    return Worse(adapter, "obstacle", f"rank {dist.get_rank()} says otherwise")


def too_long(adapter: Adapter) -> Worse:
    name, tensor = next(iter(adapter.parameters().items()))
    return Worse(adapter, "padding", lambda: {name: [range(1, tensor.numel() + 1)]})


@pytest.mark.parametrize(
    ("worse", "sentence"),
    [
        (too_long, "padding() must be ranges of elements, ascending"),
        (too_often, "hook_updates must call before and after once a step"),
        (too_early, "after must be called when parameters are new"),
        (too_few, "parameters() must contain all of the model's, but lacks module.tokens.weight"),
        (too_strange, "layers() must be modules of the model, but these are not: Linear"),
        (too_different, "obstacle must be the same on ranks"),
    ],
)
def test_a_broken_promise_is_reported(worse: Callable[[Adapter], Adapter], sentence: str):
    for result in run_ranks(promises, 2, ddp, worse):
        assert sentence in "; ".join(result)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented example of an adapter, as a package that is installed."""
    folder = tmp_path_factory.mktemp("packages")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(EXAMPLE)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return folder


def test_an_installed_package_brings_its_own_adapter(installed: Path, tmp_path: Path):
    for result in run_ranks(with_package, 2, installed, tmp_path):
        assert result == {"adapter": "ToyAdapter", "broken": [], "step": 1, "peers": [0, 1]}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "the adapter brought:adapter_of for json from torn cannot be loaded"),
        (
            "class Half:\n    model = None\n\n\ndef adapter_of(*_):\n    return Half()\n",
            "brought.Half is not an adapter",
        ),
    ],
    ids=["missing", "half"],
)
def test_a_package_that_brings_no_adapter_is_one_sentence(
    source: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = tmp_path / "torn-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torchscout.adapters]\njson = brought:adapter_of\n")
    if source is not None:
        (tmp_path / "brought.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "brought", raising=False)
    with pytest.raises(ScoutError, match=sentence):
        adapter_for(object(), None, None)
