"""Trains the small mixture of experts on ranks that share the experts, for the demo, the campaign and tests.

Expert parallelism is carved out of data parallelism. Ordinary PyTorch: nothing in it knows of torchscout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn

from torchscout.cli.moe_model import (
    EXPERTS,
    LAYERS,
    Experts,
    MoeTransformer,
    batch,
    expert_names,
    share_gradients,
)
from torchscout.mesh import LayerKind, Mesh

__all__ = ["MoeTraining", "group_of"]


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
        """``make`` gives as many experts, as ``Mixture`` calls them."""
        self.parallelism, self._rank, self._seed, self._device = mesh, dist.get_rank(), seed, device
        partition, self._holders = (group_of(mesh, axis, self._rank) for axis in ("expert", "replica"))
        torch.manual_seed(seed)
        self.model = MoeTransformer(EXPERTS, partition, layers=layers, make=make).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, number: int) -> float:
        """The step of this number, for which each rank has its own batch; the loss of all of them."""
        drawn = batch(100 * self._seed + number, self._rank)
        tokens, targets = (each.to(self._device) for each in drawn)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._average()
        share_gradients(self.model, self._holders)
        self.optimizer.step()
        return mean.item()

    def digest(self) -> str:
        """Of all that training leaves behind on this rank."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        whole = hashlib.blake2b(digest_size=8)
        for each in [*self.model.parameters(), *slots]:
            whole.update(each.detach().cpu().numpy().tobytes())
        return whole.hexdigest()

    def _average(self) -> None:
        """Data parallelism by hand, for what all ranks have in common."""
        # DDP adds up in another order after its first step, so that a job that goes on from a checkpoint
        # would not end with the same bits.
        experts = set(expert_names(self.model))
        shared = [each for name, each in self.model.named_parameters() if name not in experts]
        gradients = [each.grad for each in shared if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        lengths = [each.numel() for each in gradients]
        for each, averaged in zip(gradients, torch.split(flat, lengths), strict=True):
            each.copy_(averaged.view_as(each))


def group_of(mesh: Mesh, axis: str, rank: int) -> dist.ProcessGroup:
    """This rank's along an axis of the experts; every rank makes all of them."""
    own: dist.ProcessGroup | None = None
    for ranks in mesh.groups_along(axis, LayerKind.EXPERT):
        group = dist.new_group(list(ranks), group_desc=f"mesh_{axis}")
        own = group if rank in ranks else own
    assert own is not None
    return own
