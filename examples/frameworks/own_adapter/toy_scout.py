"""Tells torchscout about the engine. Plain PyTorch knows the rest: layers, parameters, updates."""

from typing import Any

import torch.distributed as dist

from torchscout import Parallelism
from torchscout.adapters.pytorch import PyTorchAdapter
from toy_engine import Engine


def adapter_of(model: Any, *_: Any) -> "ToyAdapter | None":
    """The adapter, if the job is an engine; None lets others look at it. An optimizer and what the user says
    of the parallelism are given too."""
    return ToyAdapter(model) if isinstance(model, Engine) else None


class ToyAdapter(PyTorchAdapter):
    """Replicas of the engine's model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.net, [engine.solver], Parallelism(replica=dist.get_world_size()))
        self._engine = engine

    def extra_state(self) -> dict[str, "_Seen"]:
        return {"toy/seen": _Seen(self._engine)}


class _Seen:
    """How much was trained on: kept in checkpoints, as a framework's own counters must be."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {"seen": self._engine.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._engine.seen = state["seen"]
