"""Training programs that notice what happens during a check: another call of a layer, a thread that goes on,
a rank that is elsewhere. They know nothing of torchscout either; see ``training_programs``.
"""

from __future__ import annotations

import gc
import itertools
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel

from tests.scenarios.training_programs import WIDTH, Block, Job, Network, adam, data, loss_of, train

# A check calls layers and their hooks once more.

losses: list[torch.Tensor] = []


class Balanced(Block):
    """Adds a loss to a list of the program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        losses.append(x.square().mean())
        return x


class KeepsItsLoss(Block):
    """Adds a loss to a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.losses.append(x.square().mean())
        return x


def adds_up_losses_of_the_program(job: Job) -> None:
    losses.clear()
    train(job, Network(Balanced), lambda *each: loss_of(*each) + _taken(losses))


def adds_up_losses_of_layers(job: Job) -> None:
    network = Network(KeepsItsLoss)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return loss_of(model, step, rank) + sum(_taken(each.losses) for each in network.layers)

    train(job, network, loss)


def _taken(found: list[torch.Tensor]) -> torch.Tensor:
    total = 0.1 * torch.stack(found).sum()
    found.clear()
    return total


def measures_gradients_in_hooks(job: Job) -> None:
    """Hooks of weights average the size of gradients, from which the learning rate follows."""
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    mean = torch.ones(())

    def measure(gradient: torch.Tensor) -> None:
        mean.lerp_(gradient.norm(), 0.5)

    for layer in model.module.layers:
        layer.mix.weight.register_hook(measure)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        agreed = mean.clone()
        dist.all_reduce(agreed)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1.0 + float(agreed))
        optimizer.step()


class Scaled(Block):
    """Has a small tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Prompted(Network):
    """A vector is trained for a network that is frozen."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.zeros(WIDTH))

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x + self.prompt if layer is self.layers[0] else x)


def updates_twice_after_one_pass(job: Job) -> None:
    """Two losses of one forward pass, with an update after each; the update changes nothing that the pass has
    saved."""
    model = Prompted()
    optimizer = torch.optim.SGD([model.prompt], lr=0.1)
    job.attach(model, optimizer, "replicas")
    for step in job.steps():
        _, tokens = data(step, job.rank)
        scores = model(tokens)
        for loss in (F.cross_entropy(scores, tokens.flip(0)), scores.square().mean()):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            dist.all_reduce(model.prompt.grad)
            optimizer.step()


# Threads that work while the main thread trains.


def _draws_while_it_updates(job: Job, draw: Callable[[], float]) -> None:
    """Another thread draws the next step's noise during each update, for 0.1 s or so."""
    asked: queue.Queue[bool] = queue.Queue()
    drawn: queue.Queue[float] = queue.Queue()

    def work() -> None:
        while asked.get():
            drawn.put(sum(draw() for _ in range(50_000)) / 50_000)

    threading.Thread(target=work, daemon=True).start()
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    job.attach(model, optimizer)
    noise = 1.0
    for step in job.steps():
        optimizer.zero_grad()
        (loss_of(model, step, job.rank) * noise).backward()
        asked.put(True)
        optimizer.step()
        noise = drawn.get()
        job.keep(noise)
    asked.put(False)


def draws_from_shared_generators(job: Job) -> None:
    random.seed(job.rank)
    torch.manual_seed(job.rank)
    turns = itertools.cycle([True] * 9 + [False])
    _draws_while_it_updates(job, lambda: random.random() if next(turns) else float(torch.rand(())))


def draws_from_a_generator_of_its_own(job: Job) -> None:
    _draws_while_it_updates(job, random.Random(job.rank).random)


def sums_up_in_a_thread(job: Job) -> None:
    """A thread has a process group to itself. It sums up twice a step, the second time on rank 0 before the
    update, and on rank 1 after it."""
    group = dist.new_group()
    asked: queue.Queue[threading.Event | None] = queue.Queue()
    sums: list[float] = []

    def work() -> None:
        while (issued := asked.get()) is not None:
            number = torch.full((8,), float(job.rank + len(sums)))
            pending = dist.all_reduce(number, group=group, async_op=True)
            issued.set()
            pending.wait()
            sums.append(float(number[0]))
            asked.task_done()

    def begin() -> None:
        issued = threading.Event()
        asked.put(issued)
        issued.wait()

    threading.Thread(target=work, daemon=True).start()
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        begin()
        asked.join()
        if job.rank == 0:
            begin()
        optimizer.step()
        if job.rank == 1:
            begin()
        asked.join()
        job.keep(sums)
    asked.put(None)


# Ranks that wait for each other.


def joins_with_fewer_batches(job: Job) -> None:
    """Rank 1 has fewer batches than rank 0, and helps it with ``Join`` until that is done."""
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.attach(model, optimizer)
    with model.join():
        for step in job.steps(4 if job.rank else 8):
            optimizer.zero_grad()
            loss_of(model, step, job.rank).backward()
            optimizer.step()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Half(nn.Module):
    """A half of a layer; the other half is on another rank. Memory may be short in its forward pass."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.group, self.is_short = group, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_short:
            raise torch.OutOfMemoryError("out of memory")
        return x + Summed.apply(torch.relu(self.mix(x)), self.group)


def is_short_of_memory_after_an_update(job: Job) -> None:
    """Two replicas of two ranks. From step 3 on, rank 1 has no memory for a forward pass between its update
    and the next step."""
    halves = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    copies = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    model = Network(lambda: Half(halves[job.rank // 2]))
    optimizer = adam(model)
    job.attach(model, optimizer, "two replicas of two slices")
    for step in job.steps():
        optimizer.zero_grad()
        loss_of(model, step, job.rank // 2).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad, group=copies[job.rank % 2])
        for layer in model.layers:
            layer.is_short = step >= 3 and job.rank == 1
        optimizer.step()
        for layer in model.layers:
            layer.is_short = False


class GatheredLate:
    """Each rank updates its part of each weight. The forward pass gathers a weight when it comes to it."""

    def __init__(self, job: Job, network: Network) -> None:
        self.layers = [*network.layers]
        self.stale: set[nn.Module] = set()
        self.own = {
            layer: nn.Parameter(layer.mix.weight.data.view(-1).chunk(job.world)[job.rank])
            for layer in self.layers
        }
        self.optimizer = torch.optim.SGD(self.own.values(), lr=0.1)
        self.optimizer.register_step_post_hook(lambda *_: self.stale.update(self.layers))
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, _: self.gather([layer]))

    def gather(self, layers: Sequence[nn.Module] | None = None) -> None:
        """All of them in the order of their gradients, the last layer first."""
        for layer in self.layers[::-1] if layers is None else layers:
            if layer in self.stale:
                self.stale.remove(layer)
                dist.all_gather_into_tensor(layer.mix.weight.data.view(-1), self.own[layer].data.clone())

    def reduce(self, rank: int, world: int) -> None:
        for layer, own in self.own.items():
            gradient, layer.mix.weight.grad = layer.mix.weight.grad, None
            dist.all_reduce(gradient)
            own.grad = gradient.view(-1).chunk(world)[rank]


def gathers_late(job: Job, fails: bool = False) -> None:
    network = Network().requires_grad_(False)
    for layer in network.layers:
        layer.mix.weight.requires_grad_(True)
    engine = GatheredLate(job, network)
    job.attach(network, engine.optimizer, "replicas", engine.gather)
    for step in job.steps():
        loss = loss_of(network, step, job.rank)
        loss.backward()
        engine.reduce(job.rank, job.world)
        if fails and (step, job.rank) == (3, 1):
            job.fail_once()
        engine.optimizer.step()
        job.keep([loss, *engine.own.values()])


def gathers_late_and_fails(job: Job) -> None:
    gathers_late(job, fails=True)


def changes_an_observer_that_starts_anew(job: Job) -> None:
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    job.attach(model, optimizer)
    for step in job.steps():
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()
        if step == 3:
            job.stop_observer()
            job.change_observer()


# Programs that join a job again, in the same process.


def _joins_again(job: Job, train: Callable[[], None]) -> None:
    """At the same port, when the store of the job that the ranks have left is gone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for _ in range(3):
        job.meet()
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=job.rank, world_size=job.world
        )
        train()
        job.leave()
        gc.collect()  # a model and its hooks refer to each other
        dist.destroy_process_group()
        while _is_open(job.port):
            time.sleep(0.01)


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def joins_again_with_a_model(job: Job) -> None:
    def steps() -> None:
        model = DistributedDataParallel(Network())
        optimizer = adam(model)
        job.attach(model, optimizer)
        for step in job.steps(3):
            optimizer.zero_grad()
            loss_of(model, step, job.rank).backward()
            optimizer.step()

    _joins_again(job, steps)


def joins_again_without_a_model(job: Job) -> None:
    def steps() -> None:
        job.attach(None)
        for step in job.steps(1):
            number = torch.full((2,), float(job.rank + step))
            dist.all_reduce(number)
            job.keep(number)

    _joins_again(job, steps)


# On a CUDA device.


def keeps_its_device_busy(job: Job) -> None:
    """The host is ahead of the device, which has work of the step left when the update has been launched."""
    model = Network().cuda()
    optimizer = adam(model)
    job.attach(model, optimizer, "one replica")
    large = torch.ones(8192, 8192, device="cuda")
    for step in job.steps():
        _, tokens = data(step, job.rank)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens.cuda()), tokens.flip(0).cuda()).backward()
        for _ in range(20):
            large @ large
        optimizer.step()
        job.is_ahead(not torch.cuda.current_stream().query())
