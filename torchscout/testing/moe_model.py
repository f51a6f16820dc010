"""A small mixture of experts, its training, and a catalog of its shapes, for demo, campaign and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn

from torchscout.experts.catalog import Catalog, Places, save
from torchscout.experts.coverage import Profiler, tabulated, uniform
from torchscout.experts.discovery import discover
from torchscout.experts.launch_profiler import LaunchProfiler
from torchscout.mesh import LayerKind, Mesh
from torchscout.testing.transformer import average_gradients, counting_batch, digest
from torchscout.utils._torch import all_to_all_single_autograd

__all__ = [
    "EXPERTS",
    "LAYERS",
    "Experts",
    "Mixture",
    "MoeTraining",
    "MoeTransformer",
    "batch",
    "catalog_for",
    "expert_names",
    "experts_at",
    "group_of",
    "save_catalog",
    "share_gradients",
]

VOCABULARY, LENGTH, WIDTH, HIDDEN, LAYERS = 32, 16, 16, 32, 2
EXPERTS, CHOSEN = 4, 2
"""Experts of a layer, and how many of them each token is routed to."""


class Router(nn.Module):
    """Chooses the experts of each token, and their weights."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = self.gate(x).softmax(-1).topk(CHOSEN, dim=-1)
        return scores / scores.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """The experts of one rank, stacked."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, counts.tolist())
        return torch.cat(
            [F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        )


class Mixture(nn.Module):
    """A router and this rank's share of the experts; the ranks of ``group`` have the rest.

    ``make(count)`` returns a module of that many experts, which takes rows sorted by expert and their counts.
    """

    def __init__(
        self, experts: int, group: dist.ProcessGroup | None, make: Callable[[int], nn.Module] = Experts
    ) -> None:
        super().__init__()
        self._group, self._ranks = group, 1 if group is None else group.size()
        self._local = experts // self._ranks
        self.router = Router(experts)
        self.experts = make(self._local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        # Rows sorted by expert, hence by rank.
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=self._ranks * self._local)
        received = self._announced(sent)
        there = sent.view(self._ranks, -1).sum(1).tolist()
        here = received.view(self._ranks, -1).sum(1).tolist()
        rows = tokens[order // CHOSEN]
        arrived = self._exchanged(rows, here, there)
        grouped, back = _by_expert(received.view(self._ranks, -1))
        computed = self.experts(arrived[grouped], received.view(self._ranks, -1).sum(0))[back]
        returned = self._exchanged(computed, there, here)
        weighted = returned * weights.flatten()[order].unsqueeze(-1)
        out: torch.Tensor = torch.zeros_like(tokens).index_add(0, order // CHOSEN, weighted)
        return out.view_as(x)

    def _announced(self, sent: torch.Tensor) -> torch.Tensor:
        """How many rows each rank will send to each of this rank's experts."""
        if self._group is None:
            return sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def _exchanged(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        if self._group is None:
            return rows
        exchanged: torch.Tensor = all_to_all_single_autograd(rows, received, sent, self._group)
        return exchanged


def _by_expert(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Permutations from rows in the order of senders to rows in the order of experts, and back."""
    ranks, experts = counts.shape
    expert_of_row = (
        torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
    )
    grouped = expert_of_row.argsort(stable=True)
    return grouped, grouped.argsort()


class MoeLayer(nn.Module):
    def __init__(
        self, experts: int, group: dist.ProcessGroup | None, make: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.mixture_norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture(experts, group, make)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm(x).cumsum(1) / LENGTH)
        mixed: torch.Tensor = self.mixture(self.mixture_norm(x))
        return x + mixed


class MoeTransformer(nn.Module):
    """A Transformer whose layers are mixtures. Without a ``group`` this rank has all experts.

    ``uneven`` is how much the untrained router prefers the first experts.
    """

    def __init__(
        self,
        experts: int = EXPERTS,
        group: dist.ProcessGroup | None = None,
        *,
        layers: int = LAYERS,
        uneven: float = 0.0,
        make: Callable[[int], nn.Module] = Experts,
    ) -> None:
        super().__init__()
        place = 0 if group is None else group.rank()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.ModuleList(MoeLayer(experts, group, make) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        preference = -uneven * torch.arange(experts, dtype=torch.float32)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Router):
                    module.gate.bias.copy_(preference)
                if isinstance(module, Mixture):  # equal among replicas, different among positions
                    for weight in module.experts.parameters():
                        weight.mul_(1 + place / 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layer:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def experts_at(layer: int) -> str:
    """The dotted path of a layer's experts."""
    return f"layer.{layer}.mixture.experts"


def expert_names(model: nn.Module) -> list[str]:
    """The names of the parameters that expert-parallel ranks do not share."""
    return [name for name, _ in model.named_parameters() if ".experts." in name]


def share_gradients(model: nn.Module, holders: dist.ProcessGroup) -> None:
    """Average the gradients of experts over the ranks that hold the same ones, as DDP does for the rest."""
    names = set(expert_names(model))
    for name, parameter in model.named_parameters():
        if name in names:
            assert parameter.grad is not None, "experts run even without rows"
            dist.all_reduce(parameter.grad, group=holders)
            parameter.grad /= dist.get_world_size()


def batch(step: int, rank: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of one rank for a step."""
    tokens = counting_batch(1000 * step + rank, rows, LENGTH, VOCABULARY)
    return tokens[:, :-1], tokens[:, 1:]


def catalog_for(spread: int, counts: Sequence[int], path: Path, *, device: str = "cpu") -> None:
    """Save a catalog of the uniform shapes ``counts`` for all layers, without compression.

    ``spread`` ranks share the experts of one replica.
    """
    torch.manual_seed(0)
    profiler = LaunchProfiler(Experts(EXPERTS // spread), WIDTH, device=device, grouped=True)
    save_catalog({"experts": profiler}, spread, counts, path)


def save_catalog(
    profilers: Mapping[str, Profiler], spread: int, counts: Sequence[int], path: Path, layers: int = LAYERS
) -> None:
    """Save a catalog with a table for each of ``profilers``, by the projection's name."""
    local = EXPERTS // spread
    shapes = [uniform(count, local) for count in counts]
    tables = [
        tabulated(name, profiler.facts(), f"rows {counts}", discover(profiler, shapes))
        for name, profiler in profilers.items()
    ]
    names = tuple(experts_at(layer) for layer in range(layers))
    save(Catalog(tuple(tables), (Places(names, local, spread, tuple(range(len(tables)))),)), path)


class MoeTraining:
    """One rank's model and optimizer, and how to take a step."""

    def __init__(
        self,
        mesh: Mesh,
        seed: int = 0,
        *,
        layers: int = LAYERS,
        make: Callable[[int], nn.Module] = Experts,
        device: torch.device | str = "cpu",
    ) -> None:
        self.parallelism, self._rank, self._seed, self._device = mesh, dist.get_rank(), seed, device
        partition, self._holders = (group_of(mesh, axis, self._rank) for axis in ("expert", "replica"))
        torch.manual_seed(seed)
        self.model = MoeTransformer(EXPERTS, partition, layers=layers, make=make).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, number: int) -> torch.Tensor:
        """Train step ``number`` on this rank's own batch; return this rank's loss."""
        drawn = batch(100 * self._seed + number, self._rank)
        tokens, targets = (each.to(self._device) for each in drawn)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        experts = set(expert_names(self.model))
        average_gradients(each for name, each in self.model.named_parameters() if name not in experts)
        share_gradients(self.model, self._holders)
        self.optimizer.step()
        return loss.detach()

    def digest(self) -> str:
        """A digest of everything that training leaves behind on this rank."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return digest([*self.model.parameters(), *slots])


def group_of(mesh: Mesh, axis: str, rank: int) -> dist.ProcessGroup:
    """This rank's process group along an axis of the expert mesh. Every rank must call this."""
    own: dist.ProcessGroup | None = None
    for ranks in mesh.groups_along(axis, LayerKind.EXPERT):
        group = dist.new_group(list(ranks), group_desc=f"mesh_{axis}")
        own = group if rank in ranks else own
    assert own is not None
    return own
