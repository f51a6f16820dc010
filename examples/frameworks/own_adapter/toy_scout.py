"""Adapter for the toy engine. ``PyTorchAdapter`` finds the rest: layers, parameters, updates."""

from typing import Any

import torch.distributed as dist

from torchscout import Parallelism
from torchscout.adapters.pytorch import PyTorchAdapter
from toy_engine import Engine


def adapter_of(model: Any, *_: Any) -> "ToyAdapter | None":
    """Return the adapter if the model is an engine; None lets other adapters try.

    The optimizer and the user's ``parallelism`` are passed too.
    """
    return ToyAdapter(model) if isinstance(model, Engine) else None


class ToyAdapter(PyTorchAdapter):
    """Replicas of the engine's model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.net, [engine.solver], Parallelism(replica=dist.get_world_size()))
        self._engine = engine

    def extra_state(self) -> dict[str, "_Seen"]:
        return {"toy/seen": _Seen(self._engine)}


class _Seen:
    """The number of tokens seen, kept in checkpoints like any counter of a framework."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {"seen": self._engine.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._engine.seen = state["seen"]
