"""Modules and optimizers that issue collectives which replay does not know of, some on part of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.call_recorder import CallRecorder
from tests.support.replayed_job import Block, Net, device, loss_of
from torchscout.attach import enable_resiliency
from torchscout.collectives.interceptor import listen
from torchscout.config import ReplayConfig
from torchscout.decision.types import Incident


def reduce(x: torch.Tensor) -> None:
    """Sum a copy over all ranks, so that training's numbers do not depend on it."""
    dist.all_reduce(x.detach().clone().sum())


class InForward(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduce(x)
        return super().forward(x)


class OnEvenCalls(Block):
    """Communicates in every other call: ranks agree on when as long as only training calls it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            reduce(x)
        return super().forward(x)


class _Reducing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  autograd's
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  autograd's
        reduce(gradient)
        return gradient


class InAutogradFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reducing.apply(super().forward(x))


class InNewThread(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=reduce, args=(x,))
        thread.start()
        thread.join()
        return super().forward(x)


class InThreadPool(Block):
    """Communicates from a thread that is older than any replay."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pool.submit(reduce, x).result()
        return super().forward(x)


def in_forward_hook(net: Net) -> None:
    for block in net.stack:
        block.register_forward_hook(lambda _, __, output: reduce(output))


def in_gradient_hook(net: Net) -> None:
    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(reduce)

    for block in net.stack:
        block.up.register_forward_hook(hook)


class GatheringAdamW(torch.optim.AdamW):
    """Issues a collective for each parameter: a clone of one parameter would issue another number of them."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.communicate()
        return result

    def communicate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                reduce(parameter)


class PooledAdamW(GatheringAdamW):
    def communicate(self) -> None:
        if not hasattr(PooledAdamW, "pool"):
            PooledAdamW.pool = ThreadPoolExecutor(1)  # type: ignore[attr-defined]
        PooledAdamW.pool.submit(super().communicate).result()  # type: ignore[attr-defined]


class EveryOtherMuon(torch.optim.Optimizer):
    """Each rank updates every n-th matrix, and all gather the results, as public versions of Muon do."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  as optimizers have it
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            every = group["params"]
            for place, parameter in enumerate(every):
                if place % size == rank and parameter.grad is not None:
                    state = self.state[parameter]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    buffer.mul_(group["momentum"]).add_(parameter.grad)
                    parameter.add_(buffer, alpha=-group["lr"])
            for place, parameter in enumerate(every):
                dist.broadcast(parameter, place % size)


@dataclass(frozen=True, slots=True)
class Hiding:
    """A place where collectives hide."""

    block: Callable[[], nn.Module] = Block
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    change: Callable[[Net], None] = field(default=lambda _: None)


HIDING = {
    "forward": Hiding(InForward),
    "forward, at every other call": Hiding(OnEvenCalls),
    "custom autograd function": Hiding(InAutogradFunction),
    "thread": Hiding(InNewThread),
    "thread pool": Hiding(InThreadPool),
    "forward hook": Hiding(change=in_forward_hook),
    "gradient hook": Hiding(change=in_gradient_hook),
    "step": Hiding(optimizer=GatheringAdamW),
    "step, in a thread pool": Hiding(optimizer=PooledAdamW),
    "step of part of the ranks": Hiding(optimizer=EveryOtherMuon),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one rank."""

    incidents: list[Incident]
    failures: list[str]
    not_checked: dict[str, str]
    certified: int | None
    collectives: list[str]
    """Of training's groups, in order, without those of the session's own."""
    bits: bytes


def hiding_training(
    rank: int, questions: Iterator[tuple[str, int, ReplayConfig | None, Path]]
) -> Iterator[Seen]:
    for place, steps, config, run_dir in questions:
        yield _train(rank, HIDING[place], steps, config, run_dir)


def _train(rank: int, hiding: Hiding, steps: int, config: ReplayConfig | None, run_dir: Path) -> Seen:
    torch.manual_seed(0)
    net = Net()
    net.stack = nn.ModuleList(hiding.block() for _ in net.stack)
    hiding.change(net)
    model = DistributedDataParallel(net.to(device()))
    optimizer = hiding.optimizer(model.parameters(), lr=1e-3)
    session = None
    if config is not None:
        session = enable_resiliency(model, optimizer, replay=config, observer=None, run_dir=run_dir)
    recorder = CallRecorder()
    with listen(recorder):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
    collectives = [each.operation for each in recorder.calls if not each.group.is_scouts]
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in net.parameters())
    if session is None:
        return Seen([], [], {}, None, collectives, bits)
    dist.barrier()  # whichever rank reports an incident has written it
    replay = session.status()["replay"]
    seen = Seen(
        session.incidents,
        list(session.failures),
        replay.get("not_checked", {}),
        session.certified_step,
        collectives,
        bits,
    )
    session.close()
    return seen
