"""Lightning Fabric: plain PyTorch inside the wrappers that ``fabric.setup`` returns (paper, section 9).

``lightning.pytorch.Trainer`` needs no adapter: pass ``trainer.model`` and ``trainer.optimizers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.adapters.versions import require
from torchscout.config import Parallelism
from torchscout.decision.progress import Phase
from torchscout.mesh import Mesh

__all__ = ["FabricAdapter", "adapter_of"]


def adapter_of(
    model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None
) -> FabricAdapter | None:
    """Return the adapter if Fabric has wrapped this model or one of its optimizers."""
    given = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    attributes = [(each, "optimizer") for each in given if isinstance(each, _FabricOptimizer)]
    attributes += [(model, "_forward_module")] if isinstance(model, _FabricModule) else []
    if attributes:
        require("lightning", lightning.__version__, {}, attributes)
    optimizers = [each.optimizer if isinstance(each, _FabricOptimizer) else each for each in given]
    inside = model._forward_module if isinstance(model, _FabricModule) else model
    is_plain = inside is model and all(a is b for a, b in zip(optimizers, given, strict=True))
    if is_plain or not isinstance(inside, torch.nn.Module):
        return None
    opened = [each for each in optimizers if each is not None]
    if wrong := [type(each).__name__ for each in opened if not isinstance(each, torch.optim.Optimizer)]:
        raise ValueError(f"optimizer must be one that Fabric or torch.optim made, got {', '.join(wrong)}")
    return FabricAdapter(inside, opened, parallelism)


class FabricAdapter(PyTorchAdapter):
    """A model and the optimizers that Fabric has wrapped."""

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        return {
            "lightning.fabric.Fabric.save": Phase.CHECKPOINT_WRITE,
            "lightning.fabric.Fabric.load": Phase.CHECKPOINT_READ,
        }
