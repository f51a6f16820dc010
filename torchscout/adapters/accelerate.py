"""Hugging Face Accelerate: plain PyTorch inside its optimizer wrappers (paper, section 9).

``Accelerator.prepare`` returns DDP, FSDP2 or DeepSpeed's engine; the last has its own adapter. Accelerate's
optimizer wrapper has no hooks, and steps only at the end of an accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.adapters.versions import require
from torchscout.config import Parallelism
from torchscout.decision.progress import Phase
from torchscout.mesh import Mesh

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["AccelerateAdapter", "adapter_of"]


def adapter_of(
    model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None
) -> AccelerateAdapter | None:
    """Return the adapter if Accelerate has wrapped an optimizer of this model."""
    given = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if not isinstance(model, torch.nn.Module) or not any(isinstance(e, AcceleratedOptimizer) for e in given):
        return None
    wrapped = [each for each in given if isinstance(each, AcceleratedOptimizer)]
    attributes = [(each, name) for each in wrapped for name in ("optimizer", "scaler")]
    require("accelerate", accelerate.__version__, {}, attributes)
    return AccelerateAdapter(model, given, parallelism)


class AccelerateAdapter(PyTorchAdapter):
    """A model and the optimizers that Accelerate prepared with it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[Any],
        parallelism: Mesh | DeviceMesh | Parallelism | None,
    ) -> None:
        wrapped = [each for each in optimizers if isinstance(each, AcceleratedOptimizer)]
        self._scalers = [each.scaler for each in wrapped if each.scaler is not None]
        opened = [each.optimizer if each in wrapped else each for each in optimizers]
        super().__init__(model, opened, parallelism)

    def extra_state(self) -> Mapping[str, Stateful]:
        """One scaler serves all optimizers of an ``Accelerator``."""
        return {"accelerate/scaler": self._scalers[0]} if self._scalers else {}

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        return {
            "accelerate.Accelerator.save_state": Phase.CHECKPOINT_WRITE,
            "accelerate.Accelerator.save_model": Phase.CHECKPOINT_WRITE,
            "accelerate.Accelerator.load_state": Phase.CHECKPOINT_READ,
        }
