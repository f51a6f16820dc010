"""The training programs of ``test_checks``: a small net, and what a program does besides training it.

Each counts how often it has done that, so that no row passes without it.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.utils._python_dispatch import TorchDispatchMode

from torchscout.utils.reentrancy import in_own_work


class Program:
    """It only trains."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps
        self.happened = 0

    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Called in each call of a layer, with its input."""
        return x

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Called with the output of each layer, outside of it."""
        return x

    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:
        """Called before torchscout is attached."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return what surrounds a forward pass."""
        return nullcontext()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def updated(self, net: Net, step: int) -> None:
        """Called after each update, and after the check that may follow it."""


class Clamps(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        @torch.no_grad()
        def clamp(*_: object) -> None:
            for each in net.parameters():
                each.clamp_(-0.05, 0.05)
            self.happened += 1

        optimizer.register_step_post_hook(clamp)


class ZeroesARow(Program):
    def updated(self, net: Net, step: int) -> None:  # noqa: ARG002
        if self.rank == 0:
            self.happened += bool(net.tokens.weight.data[1].any())
            net.tokens.weight.data[1] = 0.0


class ScalesOnce(Program):
    def updated(self, net: Net, step: int) -> None:
        if step == 2:
            net.head.weight.data.mul_(0.9)
            self.happened += 1


class Diverges(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._calls = 0
        net.head.register_forward_hook(self._spoil)

    def _spoil(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        self._calls += not in_own_work()
        if self._calls < self.steps:
            return output
        self.happened += 1
        return output * math.nan


class Draws(Program):
    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.happened += in_own_work()
        return x * (1 + int.from_bytes(os.urandom(4), "little") / 2**32)


class KeepsStatistics(Program):
    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        self.happened += 1
        block.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x - block.mean


class Masks(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        for block in net.stack:
            block.mean.fill_(-math.inf)

    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        self.happened += bool(block.mean.isinf().all())
        return x + torch.exp(block.mean)


class WritesToAWeight(Program):
    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        self.happened += 1
        with torch.no_grad():
            block.up.weight.mul_(1.0)
        return x


class FailsInReplays(Program):
    def layer(self, block: Block, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if in_own_work() and self.rank == 1:
            self.happened += 1
            raise torch.OutOfMemoryError("no memory for a replay")
        return x


class NoRoom(TorchDispatchMode):
    """Lets no tensor be copied, as if memory were full."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self._program.happened += 1
            raise torch.OutOfMemoryError("no memory for a copy")
        return func(*args, **(kwargs or {}))


class NoRoomForInputs(Program):
    def forward(self) -> AbstractContextManager[Any]:
        return NoRoom(self)


class NoRoomForUpdates(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._room = NoRoom(self)
        # Until the update ends: there is memory for the check that follows.
        optimizer.register_step_post_hook(lambda *_: self._room.__exit__(None, None, None))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self._room.__enter__()
        optimizer.step()


class Packs(Program):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.happened += 1
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


class AveragesWeights(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        state = local_sgd.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, local_sgd.post_localSGD_hook)
        self._averager = PeriodicModelAverager(period=2, warmup_steps=2)

    def updated(self, net: Net, step: int) -> None:  # noqa: ARG002
        self.happened += 1
        self._averager.average_parameters(net.parameters())


class RefusesHooks(Program):
    def begin(self, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        if self.rank == 1:
            net.stack[0].register_forward_pre_hook = self._refuse

    def _refuse(self, *_: object, **__: object) -> None:
        self.happened += 1
        raise RuntimeError("this layer takes no hooks")


PROGRAMS: dict[str, type[Program]] = {
    "it only trains": Program,
    "a hook clamps the weights after each update": Clamps,
    "a row of a table is set to zero after each update, on rank 0, which alone has it": ZeroesARow,
    "all ranks scale a weight by parameter.data, once": ScalesOnce,
    "the loss becomes NaN in the last step": Diverges,
    "a layer draws random numbers that no seed decides": Draws,
    "each rank keeps running statistics of its own data": KeepsStatistics,
    "buffers hold infinity, as attention masks do": Masks,
    "a layer writes to its own weight": WritesToAWeight,
    "a layer has no memory on rank 1 whenever it is replayed": FailsInReplays,
    "there is no memory to copy what a layer receives": NoRoomForInputs,
    "there is no memory to copy what an update starts from": NoRoomForUpdates,
    "outputs are packed behind one number, so that their gradients have odd addresses": Packs,
    "weights are averaged in every other step, and gradients are not": AveragesWeights,
    "a layer of rank 1 takes no hooks": RefusesHooks,
}


class Block(nn.Module):
    def __init__(self, program: Program, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("table", torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self._program = program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._program.layer(self, x * self.table)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, program: Program, width: int, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.stack = nn.ModuleList(Block(program, width) for _ in range(2))
        self.head = nn.Linear(width, words)
        self._program = program

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tokens(words)
        for block in self.stack:
            x = self._program.between(block(x))
        return self.head(x)
