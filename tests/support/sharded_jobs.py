"""Small jobs on every sharding that replay covers, each trained with a check at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.support.replay_results import Result, bits_of, result_of
from tests.support.replayed_job import Net, flip_in_memory, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.utils.reentrancy import in_own_work

EVERY_STEP = ReplayConfig(interval=1, records="all")
HAS_RESET = hasattr(FSDPModule, "reset_iter_state")
"""Whether this PyTorch has the public call, which came with 2.13."""


def plain(net: Net, mesh: object) -> None:
    for block in net.stack:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def nested(net: Net, mesh: object) -> None:
    for block in net.stack:
        fully_shard(block.up, mesh=mesh)
    plain(net, mesh)


def grouped(net: Net, mesh: object) -> None:
    fully_shard([net.final, net.head], mesh=mesh)
    plain(net, mesh)


def bfloat16(net: Net, mesh: object) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.stack:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def checkpointed(net: Net, mesh: object) -> None:
    for place, block in enumerate(net.stack):
        net.stack[place] = checkpoint_wrapper(block)
    plain(net, mesh)


def compiled(net: Net, mesh: object) -> None:
    for place, block in enumerate(net.stack):
        net.stack[place] = torch.compile(block, backend="aot_eager")
    plain(net, mesh)


def prefetched(net: Net, mesh: object) -> None:
    """The first block's passes begin by gathering the second one's parameters."""
    plain(net, mesh)
    first, second = net.stack
    first.set_modules_to_forward_prefetch([second])
    first.set_modules_to_backward_prefetch([second])


SHARDINGS: dict[str, Callable[[Net, object], None]] = {
    each.__name__: each for each in (plain, nested, grouped, bfloat16, checkpointed, compiled, prefetched)
}


@dataclass(frozen=True, slots=True)
class Failing:
    """The first block raises whenever it is replayed."""

    ranks: tuple[int, ...] = ()
    """On these ranks."""
    within: str = "forward"
    """In this pass: ``forward``, ``backward``, or at its ``entry``, before FSDP sees the call."""

    def apply(self, block: nn.Module) -> None:
        if self.within == "entry":
            block.register_forward_pre_hook(_fail, prepend=True)
        elif self.within == "forward":
            block.get_submodule("up").register_forward_hook(_fail)
        else:
            block.get_submodule("up").register_forward_hook(_fail_in_backward)


def _fail(*_: object) -> None:
    if in_own_work():
        raise torch.OutOfMemoryError("no memory is left for a replay")


def _fail_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> None:
    output.register_hook(_fail)


def as_before_reset() -> None:
    """Remove FSDP's public reset call in this rank's process, as before PyTorch 2.13."""
    if HAS_RESET:
        del FSDPModule.reset_iter_state


def train(
    rank: int,
    shape: tuple[int, ...],
    sharding: str,
    run_dir: Path | None,
    faults: FaultPlan = FaultPlan(),  # noqa: B008  frozen
    steps: int = 12,
    at_rest: int | None = None,
    failing: Failing = Failing(),  # noqa: B008  frozen
) -> Result:
    """Train; ``at_rest`` is a rank whose shard changes by itself between the second and third update."""
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    torch.manual_seed(0)
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    net = Net()
    SHARDINGS[sharding](net, init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with Injector(faults, rank, net, optimizer) as injector:
        session = run_dir and enable_resiliency(
            net, optimizer, replay=EVERY_STEP, observer=None, run_dir=run_dir
        )
        if rank in failing.ranks:
            failing.apply(net.stack[0])
        for step in range(1, steps + 1):
            if step == 3 and at_rest == rank:
                assert flip_in_memory(next(net.stack[1].parameters()), 3)
            loss = loss_of(net, step, rank)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return result_of(bits_of(net, optimizer), session or None, len(injector.fired), tuple(Manifestation))
