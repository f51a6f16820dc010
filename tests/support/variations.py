"""Small models and training loops, each with one peculiarity that users' code has."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, LENGTH = 16, 20, 6


class Block(nn.Module):
    """Dropout, a norm with running statistics, a buffer that counts and a counter that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls, self.history = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.history.append(self.calls)
            self.seen += 1
        return x + self.drop(torch.relu(self.norm(self.mix(x).transpose(1, 2)).transpose(1, 2)))


class InPlace(Block):
    """A module that writes into its own input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(super().forward(1.5 * x))


class Moody(Block):
    """A module that draws from Python's and NumPy's generators, and from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.own)
        return super().forward(x) * (random.random() + np.random.rand()) + noise


class Named(Block):
    """A module that is called with keyword arguments, some of them no tensors, and returns a tree."""

    def forward(self, *, hidden: torch.Tensor, mask: torch.Tensor | None, scale: int, how: Any) -> dict:
        x = how(super().forward(hidden)) * scale
        return {"hidden": x, "extra": (None, x.mean().detach(), x.sum()), "kind": "tree", "mask": mask}


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, *, tied: bool = False) -> None:
        super().__init__()
        self.look_up = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.ModuleList(block() for _ in range(3))
        self.say = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.say.weight = self.look_up.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.look_up(tokens)
        for each in self.trunk:
            x = self.call(each, x)
        return self.say(x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class CheckpointedNet(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=self._reentrant)


class NamingNet(Net):
    def __init__(self) -> None:
        super().__init__(Named)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = block(hidden=x, mask=None, scale=2, how=torch.tanh)
        return out["hidden"] + 0.01 * out["extra"][2]


def lengths_vary(step: int, rank: int) -> int:
    """Return a sequence length that differs by rank and step."""
    return 3 + (step + rank) % 4


def fixed(step: int, rank: int) -> int:
    return LENGTH


@dataclass(frozen=True, slots=True)
class Variation:
    """One job: a model and a way to train it."""

    net: Callable[[], nn.Module] = Net
    optimizers: Callable[[Net], list[torch.optim.Optimizer]] = field(
        default=lambda net: [torch.optim.AdamW(net.parameters(), lr=1e-2)]
    )
    wrapped: bool = True
    """In DDP; otherwise gradients are averaged by hand."""
    microbatches: int = 1
    autocast: torch.dtype | None = None
    length: Callable[[int, int], int] = fixed
    evaluates: bool = False
    skips: bool = False
    """Every fourth step ends without an update."""
    clips: bool = False
    unchecked: tuple[str, ...] = ()
    """What replay cannot check here, by the beginning of its surface."""


def frozen(net: Net) -> list[torch.optim.Optimizer]:
    net.look_up.requires_grad_(False)
    net.trunk[0].requires_grad_(False)
    return [torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)]


def several(net: Net) -> list[torch.optim.Optimizer]:
    rest = [p for name, p in net.named_parameters() if not name.startswith("trunk")]
    return [torch.optim.SGD(net.trunk.parameters(), lr=1e-2, momentum=0.9), torch.optim.Adam(rest, lr=1e-2)]


class Smooth(nn.Module):
    """A module that compiles without a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.mix(self.norm(x))))


def compiled_blocks() -> Net:
    net = Net(Smooth)
    for place, block in enumerate(net.trunk):
        net.trunk[place] = torch.compile(block, backend="aot_eager")
    return net


def compiled_in_place() -> Net:
    net = Net(Smooth)
    for block in net.trunk:
        block.compile(backend="aot_eager")
    return net


def compiled_as_a_whole() -> nn.Module:
    return torch.compile(Net(), backend="eager")  # aot_eager cannot run this norm backward


def compiled_as_a_whole_in_place() -> Net:
    net = Net(Smooth)
    net.compile(backend="aot_eager", fullgraph=True)
    return net


def in_wrappers() -> Net:
    net = Net()
    for place, block in enumerate(net.trunk):
        net.trunk[place] = checkpoint_wrapper(block)
    return net


VARIATIONS: dict[str, Variation] = {
    "plain": Variation(),
    "changes its input in place": Variation(net=functools.partial(Net, InPlace)),
    "draws from other generators": Variation(net=functools.partial(Net, Moody)),
    "calls by name and returns trees": Variation(net=NamingNet),
    "checkpoints activations": Variation(net=functools.partial(CheckpointedNet, reentrant=False)),
    "checkpoints activations by wrappers": Variation(net=in_wrappers),
    "checkpoints activations reentrantly": Variation(
        net=functools.partial(CheckpointedNet, reentrant=True), unchecked=("trunk",)
    ),
    "casts to bfloat16": Variation(autocast=torch.bfloat16),
    "accumulates gradients": Variation(microbatches=3),
    "has several optimizers": Variation(optimizers=several),
    "has frozen parameters": Variation(optimizers=frozen),
    "ties its embeddings": Variation(net=functools.partial(Net, tied=True)),
    "compiles its blocks": Variation(net=compiled_blocks),
    "compiles its blocks in place": Variation(net=compiled_in_place),
    "compiles its model": Variation(net=compiled_as_a_whole, length=lengths_vary, evaluates=True),
    "compiles its model in place": Variation(net=compiled_as_a_whole_in_place, microbatches=2),
    "has no wrapper": Variation(wrapped=False),
    "varies its sequence length": Variation(length=lengths_vary, evaluates=True),
    "evaluates, skips updates and clips": Variation(evaluates=True, skips=True, clips=True),
}


@dataclass(slots=True)
class Trained:
    """The state that training has left after every step, as bytes."""

    net: Net
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    steps: list[bytes] = field(default_factory=list)


def train(variation: Variation, rank: int, steps: int) -> Iterator[Trained]:
    """Train; yield before the first step, so that the caller may attach, and after every step."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    net = variation.net()
    optimizers = variation.optimizers(net)
    model = DistributedDataParallel(net) if variation.wrapped else net
    trained = Trained(net, model, optimizers)
    yield trained
    for step in range(1, steps + 1):
        losses = [_backward(variation, model, step, rank, micro) for micro in range(variation.microbatches)]
        if not variation.wrapped:
            _average(net)
        if variation.clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if not (variation.skips and step % 4 == 0):
            for optimizer in optimizers:
                optimizer.step()
        trained.steps.append(_everything(trained, losses))
        for optimizer in optimizers:
            optimizer.zero_grad()
        if variation.evaluates:
            _evaluate(model, step, rank)
        yield trained


def _backward(variation: Variation, model: nn.Module, step: int, rank: int, micro: int) -> torch.Tensor:
    tokens = _tokens(100 * step + micro, rank, variation.length(step, rank))
    last = micro == variation.microbatches - 1
    with ExitStack() as around:
        around.enter_context(nullcontext() if last or not variation.wrapped else model.no_sync())
        if variation.autocast is not None:
            around.enter_context(torch.autocast("cpu", dtype=variation.autocast))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return loss.detach()


def _evaluate(model: nn.Module, step: int, rank: int) -> None:
    """Evaluate in another mode, without gradients, on batches of another size."""
    model.eval()
    with torch.no_grad():
        model(_tokens(7 * step, rank, 9))
    model.train()


def _tokens(seed: int, rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * seed + rank)
    return torch.randint(VOCABULARY, (4, length + 1), generator=generator)


def _average(net: nn.Module) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def _everything(trained: Trained, losses: list[torch.Tensor]) -> bytes:
    """Return every bit that training depends on."""
    net = trained.net
    tensors = [*losses, *net.state_dict().values(), torch.get_rng_state()]
    tensors += [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    tensors += [
        slot for each in trained.optimizers for slots in each.state.values() for slot in slots.values()
    ]
    plain = [(vars(each).get("calls"), vars(each).get("history"), each.training) for each in net.modules()]
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
    )
    own = [each.own.get_state().tolist() for each in net.modules() if hasattr(each, "own")]
    rest = repr((random.getstate(), np.random.get_state()[1].tolist(), plain, flags, own)).encode()
    return b"".join(tensor.detach().float().numpy().tobytes() for tensor in tensors) + rest
