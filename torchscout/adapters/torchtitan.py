"""TorchTitan 0.3: its trainer as a job (paper, section 9).

FSDP2 and tensor parallelism are plain PyTorch, which ``adapters.pytorch`` handles. ``plugins.torchtitan``
attaches without a change to config or loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torchtitan
from torchtitan.trainer import Trainer

from torchscout.adapters.pytorch import PyTorchAdapter, around_steps
from torchscout.adapters.versions import require
from torchscout.mesh import AXES, LayerKind, Mesh
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchscout.state.collect import Stateful

__all__ = ["TorchTitanAdapter", "adapter_of"]

_USES = (
    "dataloader",
    "load_state_dict",
    "lr_schedulers",
    "model_parts",
    "optimizers",
    "state_dict",
    # Not ``train_context``, which is not there yet where the override attaches: the trainer is being built.
    *(f"parallel_dims.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
    "parallel_dims.get_all_one_dimensional_meshes",
)
"""The attributes of a Trainer that are used here."""
_DENSE = {"pp": "pipeline", "dp_replicate": "replica", "dp_shard": "shard", "cp": "context", "tp": "tensor"}
_SPARSE = {"pp": "pipeline", "dp_replicate": "replica", "efsdp": "shard", "ep": "expert"}
"""SCOUT's names for TorchTitan's axes, slowest first; experts have axes of their own."""
_FOLDED = {
    "fsdp": ("shard", "context"),
    "batch": ("replica", "shard"),
    "dp": ("replica", "shard"),
    "loss": ("replica", "shard", "context"),
}
"""TorchTitan's names for several axes as one."""


def adapter_of(job: Any, optimizer: Any, parallelism: Any) -> TorchTitanAdapter | None:
    """Return the adapter if the job is a Trainer."""
    if not isinstance(job, Trainer):
        return None
    if optimizer is not None or parallelism is not None:
        raise ValueError("a Trainer has its optimizers and its parallelism; pass only the Trainer")
    require("torchtitan", torchtitan.__version__, {}, [(job, name) for name in _USES])
    return TorchTitanAdapter(job)


class TorchTitanAdapter(PyTorchAdapter):
    """The model parts and optimizers of a trainer, on the meshes that it built."""

    def __init__(self, trainer: Trainer) -> None:
        parts = trainer.model_parts
        model = parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)
        super().__init__(model, tuple(trainer.optimizers), None)
        self._trainer = trainer
        self._progress = _Progress(trainer)

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        """Layers under ``spmd_types`` ask for the mesh of the step in which they are called."""
        return replace(super().gatherers(module), around=self._in_step)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        with self._trainer.train_context():
            yield

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        dims = self._trainer.parallel_dims
        dense = _table({axis: getattr(dims, name) for name, axis in _DENSE.items()})
        expert = None
        if dims.ep > 1:
            sizes = (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp * dims.tp // dims.ep, dims.ep)
            expert = _table(dict(zip(_SPARSE.values(), sizes, strict=True)))
        mesh = Mesh(dense, hosts, expert_addresses=expert)
        _check(mesh, dims)
        return mesh

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        def updated() -> None:
            self._progress.note()
            after()

        return around_steps([self._trainer.optimizers], before, updated)

    def extra_state(self) -> Mapping[str, Stateful]:
        return {
            "dataloader": _Position(self._trainer.dataloader),
            "lr_schedulers": _Schedule(self._trainer.lr_schedulers),
            "train_state": self._progress,
        }


class _Schedule:
    """The learning rate schedules; their container is iterable and would be taken for a data loader."""

    def __init__(self, stateful: Any) -> None:
        self._stateful = stateful

    def state_dict(self) -> Any:
        return self._stateful.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        self._stateful.load_state_dict(state)


class _Position(_Schedule):
    """The position of a data loader; checkpoints recognize loaders by being iterable."""

    def __iter__(self) -> Any:
        return iter(self._stateful)

    def load_state_dict(self, state: Any, /) -> None:
        super().load_state_dict(state)
        # A loader draws a seed when it starts: start it before random streams are restored.
        self.state_dict()


class _Progress:
    """The trainer's progress as of its last update: it counts the next step before that begins."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._noted: Any = None

    def note(self) -> None:
        self._noted = self._trainer.state_dict()

    def state_dict(self) -> Any:
        return self._noted or self._trainer.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        self._trainer.load_state_dict(state)
        self._noted = None


def _table(degrees: Mapping[str, int]) -> Any:
    """The address of every rank; the last axis varies fastest."""
    sizes = tuple(degrees.values())
    table = np.zeros((int(np.prod(sizes)), len(AXES)), dtype=np.int64)
    for axis, places in zip(degrees, np.indices(sizes), strict=True):
        table[:, AXES.index(axis)] = places.flatten()
    return table


def _check(mesh: Mesh, dims: Any) -> None:
    """Raise ``ValueError`` if TorchTitan's own groups differ from the mesh."""
    rank = dist.get_rank()
    for name, devices in dims.get_all_one_dimensional_meshes().items():
        role = LayerKind.EXPERT if name in ("ep", "efsdp") else LayerKind.DENSE
        axis = (_SPARSE if role is LayerKind.EXPERT else _DENSE).get(name)
        axes = _FOLDED.get(name, ()) if axis is None else (axis,)
        expected, found = [rank], devices.mesh.flatten().tolist()
        for each in axes:
            expected = [peer for member in expected for peer in mesh.ranks_along(each, member, role)]
        if axes and sorted(expected) != found:
            raise ValueError(
                f"TorchTitan {torchtitan.__version__} lays out ranks differently than 0.3.0: rank {rank} has "
                f"{found} along {name!r}, expected {sorted(expected)}"
            )
