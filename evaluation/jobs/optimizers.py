"""Programs whose optimizer is the point: it communicates, it is sharded, or it is one of the less usual."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, next_token_loss, text
from torchscout.config import Parallelism


def orthogonalized(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix, by the quintic Newton-Schulz iteration that Muon uses."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class GatheringMuon(torch.optim.Optimizer):
    """Each rank computes the update of every world_size-th matrix, and all ranks gather all of them."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = sorted(group["params"], key=lambda each: each.numel(), reverse=True)
            for first in range(0, len(params), world):
                turn = params[first : first + world]
                updates = [torch.zeros(each.shape) for each in turn]
                if rank < len(turn):
                    updates[rank] = self._update(turn[rank], group["momentum"])
                for owner, (param, update) in enumerate(zip(turn, updates, strict=True)):
                    received = [torch.empty_like(update) for _ in range(world)]
                    dist.all_gather(received, update)
                    param.add_(received[owner], alpha=-group["lr"])

    def _update(self, param: nn.Parameter, momentum: float) -> torch.Tensor:
        buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        buffer.lerp_(param.grad, 1 - momentum)
        return orthogonalized(param.grad.lerp(buffer, momentum))


class ShardedAdamW(torch.optim.Optimizer):
    """Reduce-scatters gradients, keeps the moments of its own rows only, and gathers the parameters.

    A parameter whose rows cannot be divided is updated by every rank, from an all-reduced gradient.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for param in group["params"]:
                if param.shape[0] % world:
                    dist.all_reduce(param.grad)
                    self._update(param, param, param.grad / world, group)
                    continue
                rows = param.shape[0] // world
                grad = torch.empty_like(param[:rows])
                dist.reduce_scatter_tensor(grad, param.grad.contiguous())
                own = param[rank * rows : (rank + 1) * rows]
                self._update(param, own, grad / world, group)
                dist.all_gather_into_tensor(param, own.clone())

    def _update(self, key: nn.Parameter, own: torch.Tensor, grad: torch.Tensor, group: dict) -> None:
        state = self.state[key]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - second)
        rate = group["lr"] / (1 - first ** state["step"])
        scale = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        own.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(state["exp_avg"], scale, value=-rate)


def muon_gathering(job: Job) -> None:
    """nanoGPT with Muon for matrices and AdamW for the rest."""
    model = DistributedDataParallel(GPT())
    hidden = [each for each in model.module.blocks.parameters() if each.ndim == 2]
    chosen = {id(each) for each in hidden}
    rest = [each for each in model.parameters() if id(each) not in chosen]
    optimizers = [torch.optim.AdamW(rest, lr=1e-3), GatheringMuon(hidden)]
    job.attach(model, optimizers)
    _train(job, model, optimizers)


def sharded_by_hand(job: Job) -> None:
    """As nanochat does: plain tensors, no wrapper, the optimizer averages gradients and shards its state."""
    model = GPT(dropout=0.0)
    optimizer = ShardedAdamW(model.parameters())
    job.attach(model, optimizer, parallelism=Parallelism(replica=job.world))
    _train(job, model, [optimizer])


def zero_redundancy(job: Job) -> None:
    model = DistributedDataParallel(GPT())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, weight_decay=0.1
    )
    job.attach(model, optimizer, also=lambda: _states(optimizer.optim))
    _train(job, model, [optimizer])


def torch_muon(job: Job) -> None:
    """PyTorch's own Muon takes matrices only."""
    model = DistributedDataParallel(GPT())
    hidden = [each for each in model.module.blocks.parameters() if each.ndim == 2]
    chosen = {id(each) for each in hidden}
    rest = [each for each in model.parameters() if id(each) not in chosen]
    optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    job.attach(model, optimizers)
    _train(job, model, optimizers)


def adafactor(job: Job) -> None:
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    job.attach(model, optimizer)
    _train(job, model, [optimizer])


def _train(job: Job, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for step in job.steps():
        tokens, targets = text(step, job.rank)
        loss = next_token_loss(model(tokens), targets)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def _states(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [optimizer.state.get(each, {}) for group in optimizer.param_groups for each in group["params"]]


_ON_CUDA = ("healthy", "slow_then_flipped")
_OF_SLICES = ("*/optimizer", "*.exp_avg", "*.exp_avg_sq")
JOBS: dict[str, Entry] = {
    "muon-gathering": Entry(muon_gathering, in_ci=("healthy",), on_cuda=_ON_CUDA),
    "sharded-by-hand": Entry(sharded_by_hand, flip="reported", unchecked=_OF_SLICES, on_cuda=_ON_CUDA),
    "zero-redundancy": Entry(zero_redundancy, flip="reported", unchecked=_OF_SLICES, on_cuda=_ON_CUDA),
    "torch-muon": Entry(torch_muon, unchecked=(), on_cuda=_ON_CUDA),
    "adafactor": Entry(adafactor, unchecked=(), on_cuda=_ON_CUDA),
}
