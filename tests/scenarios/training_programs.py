"""Training programs, each with one property that programs of other people have.

They know nothing of torchscout. A program calls ``attach`` where a user would attach it, and goes over
``steps``. What it trains is compared, bit for bit, with what it trains without.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, ROWS, STEPS = 16, 8, 4, 6


class Job(Protocol):
    """What a program needs of the test that runs it."""

    rank: int
    world: int
    port: int
    """A free port of this machine."""

    def attach(
        self,
        model: nn.Module | None,
        optimizer: Any = None,
        layout: str | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Attach torchscout, as a user does; without a model it looks for hangs only.

        ``layout`` is what the ranks are, where DDP does not show it. ``finish`` ends an update that the next
        forward pass would end otherwise.
        """

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Count from 1. After each step, weights and optimizer state are noted."""

    def keep(self, value: Any) -> None:
        """Note something else that training leaves behind."""

    def leave(self) -> None:
        """Close what ``attach`` has opened."""

    def is_ahead(self, is_ahead: bool) -> None:
        """Note whether the host has launched a step that the device has not finished."""

    def meet(self) -> None:
        """Wait until all ranks are here, without ``torch.distributed``."""

    def fail_once(self) -> None:
        """Let torchscout fail on this rank, after the next update. The cause is gone afterwards."""

    def stop_observer(self) -> None:
        """Kill the observer of this rank, and stop the process that takes its place while it starts."""

    def change_observer(self) -> None:
        """Change a setting of the observer."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


class Network(nn.Module):
    """An embedding, three layers and an output layer."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.output = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.output(x)

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


def data(step: int, rank: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of this shape, and a class for each row."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, *shape, generator=source), torch.randint(CLASSES, (ROWS,), generator=source)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    _, tokens = data(step, rank)
    return F.cross_entropy(model(tokens), tokens.flip(0))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    job: Job,
    network: nn.Module,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
    after: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """The plain loop of most programs; ``after`` is called after each update."""
    model = DistributedDataParallel(network)
    optimizer = adam(model)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss(model, step, job.rank).backward()
        optimizer.step()
        after(model)


# Ordinary programs.


def accumulates_unevenly(job: Job) -> None:
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    job.attach(model, optimizer)
    for step in job.steps():
        parts = 1 + (step + job.rank) % 3
        for part in range(parts):
            with nullcontext() if part == parts - 1 else model.no_sync():
                loss_of(model, step + 100 * part, job.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def has_two_optimizers(job: Job) -> None:
    model = DistributedDataParallel(Network())
    rest = [each for name, each in model.named_parameters() if "layers" not in name]
    optimizers = [
        torch.optim.SGD(model.module.layers.parameters(), lr=1e-2, momentum=0.9),
        torch.optim.AdamW(rest, lr=1e-2),
    ]
    job.attach(model, optimizers)
    for step in job.steps():
        loss_of(model, step, job.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def averages_its_weights(job: Job) -> None:
    network = Network()
    mean = copy.deepcopy(network).eval()

    @torch.no_grad()
    def average(model: nn.Module) -> None:
        for own, each in zip(mean.parameters(), model.parameters(), strict=True):
            own.lerp_(each, 0.1)
        job.keep([*mean.parameters(), loss_of(mean, 0, job.rank)])

    train(job, network, after=average)


def skips_an_update(job: Job) -> None:
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss = loss_of(model, step, job.rank) * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        job.keep(scaler.get_scale())


class Recomputing(Network):
    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)


def recomputes_activations(job: Job) -> None:
    train(job, Recomputing())


def ties_its_weights(job: Job) -> None:
    network = Network()
    network.output.weight = network.tokens.weight
    train(job, network)


class RandomBlock(Block):
    """Drops out, and draws from the generators of Python and NumPy; its statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.statistics(super().forward(x))) * random.random() * np.random.random()


def draws_and_keeps_statistics(job: Job) -> None:
    random.seed(job.rank)
    np.random.seed(job.rank)
    torch.manual_seed(job.rank)
    network = Network(RandomBlock)

    def note(_: nn.Module) -> None:
        statistics = [each.clone() for each in network.buffers()]
        job.keep([random.random(), np.random.random(), torch.rand(1), *statistics])

    train(job, network, after=note)


class ScaledBlock(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * scale)


class ScaledNetwork(Network):
    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, torch.tensor(0.5).expand(1))


def passes_an_expanded_number(job: Job) -> None:
    train(job, ScaledNetwork(ScaledBlock))


def catches_an_exception(job: Job) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        try:
            found = loss_of(model, step, rank)
            if step in (2, 3):
                raise ValueError("this batch is empty")
        except ValueError:
            return loss_of(model, step + 100, rank)
        return found

    train(job, Network(), loss)


# Models and optimizers of other people.


class VisionTransformer(nn.Module):
    """A class token and positions are parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.patches = nn.Linear(12, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), self.patches(patches)], dim=1)
        x = x + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.classes(x[:, 0])


def is_a_vision_transformer(job: Job) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        patches, classes = data(step, rank, 4, 12)
        return F.cross_entropy(model(patches), classes)

    train(job, VisionTransformer(), loss)


class Student(nn.Module):
    """A backbone, and a head of which nothing is kept: a small network, then a matrix of prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.backbone = nn.Linear(48, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, 12))
        self.prototypes = nn.Linear(12, 32, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images.flatten(1))
        for layer in self.backbone:
            x = layer(x)
        return self.prototypes(F.normalize(self.head(x), dim=-1))


def distils_itself(job: Job) -> None:
    """As DINO: the teacher is an average of the student, which learns to predict it on another view."""
    student = Student()
    teacher = copy.deepcopy(student).requires_grad_(False)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        patches, _ = data(step, rank, 4, 12)
        return F.cross_entropy(model(patches.flip(1)) / 0.1, (teacher(patches) / 0.04).softmax(-1))

    def average(model: nn.Module) -> None:
        for mean, each in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.lerp_(each.detach(), 0.01)
        job.keep([*teacher.parameters()])

    train(job, student, loss, average)


class Stage(nn.Module):
    """Adds the time to the channels of an image."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.time, self.convolution = nn.Linear(WIDTH, out), nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(x) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    """Its output layer is a convolution; the matrices that it has are for the time."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Stage(1, 8), Stage(8, 8)])
        self.up = nn.ModuleList([Stage(8, 8), Stage(16, 8)])
        self.times = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        time = self.times(time)
        first = self.down[0](x, time)
        x = self.up[0](self.down[1](first, time), time)
        return self.out(self.up[1](torch.cat([x, first], dim=1), time))


def removes_noise(job: Job) -> None:
    """As a diffusion model."""

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        clean, _ = data(step, rank, 1, 4, 4)
        noise, _ = data(step + 100, rank, 1, 4, 4)
        time = torch.full((ROWS, 1), step / STEPS)
        return F.mse_loss(model(clean + noise * time[:, :, None, None], time), noise)

    train(job, UNet(), loss)


class SharpnessAware(torch.optim.Optimizer):
    """As SAM is published: loops call ``first_step`` and ``second_step``, and never ``step``."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
        self.every = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([each.grad.norm() for each in self.every]).norm()
        for each in self.every:
            self.state[each]["old"] = each.clone()
            each.add_(each.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each in self.every:
            each.copy_(self.state[each]["old"])
        self.base.step()
        self.zero_grad()


def never_calls_step(job: Job) -> None:
    model = DistributedDataParallel(Network())
    optimizer = SharpnessAware(model.parameters(), lr=0.1, momentum=0.9)
    job.attach(model, optimizer)
    for step in job.steps():
        loss_of(model, step, job.rank).backward()
        optimizer.first_step()
        loss_of(model, step, job.rank).backward()
        optimizer.second_step()


def wraps_its_optimizer(job: Job) -> None:
    """Local SGD with PyTorch's ``PostLocalSGDOptimizer``, as its documentation shows it."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(Network())
    alone = [dist.new_group([rank]) for rank in range(job.world)][job.rank]
    model.register_comm_hook(local_sgd.PostLocalSGDState(None, alone, 2), local_sgd.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()


class InPython(dist.ProcessGroup):
    """A backend that is written in Python, for one rank. PyTorch gives such a group no store."""

    def getBackendName(self) -> str:  # noqa: N802  PyTorch's
        return "in-python"

    def allreduce(self, *_: Any) -> dist.Work:
        return _Done()


class _Done(dist.Work):
    def wait(self, *_: Any) -> bool:
        return True


def has_a_backend_in_python(job: Job) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "in-python" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "in-python", lambda _, rank, size, __: InPython(rank, size), devices=["cpu"]
        )
    dist.init_process_group("in-python", rank=0, world_size=1, store=dist.HashStore())
    model = Network()
    optimizer = adam(model)
    job.attach(model, optimizer, "one replica")
    for step in job.steps():
        loss_of(model, step, job.rank).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()
        optimizer.zero_grad()


def has_many_small_layers(job: Job) -> None:
    """Each rank is a stage of its own, with 160 tensors of state."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(40)))
    optimizer = adam(model)
    job.attach(model, optimizer, "stages")
    for _ in job.steps(20):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
