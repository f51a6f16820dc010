"""A job whose model is not known: only its communication is watched (paper, section 7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.mesh import Mesh

__all__ = ["NoModelAdapter"]


class NoModelAdapter(PyTorchAdapter):
    """Any program that uses ``torch.distributed``: training, inference, reinforcement learning."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module(), (), None)

    @property
    def obstacle(self) -> str | None:
        return "there is no model"

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        """No two ranks are assumed to do the same work."""
        return Mesh.grid(pipeline=dist.get_world_size()).on(hosts)
