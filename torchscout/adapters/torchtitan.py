"""TorchTitan 0.3: its trainer as a job (paper, section 9).

What FSDP2 and tensor parallelism do underneath is plain PyTorch, which ``pytorch`` handles. Earlier releases
are refused. ``plugins.torchtitan`` attaches without a change to config or loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torchtitan
from torchtitan.trainer import Trainer

from torchscout.adapters.pytorch import PyTorchAdapter, around_steps
from torchscout.adapters.versions import unknown
from torchscout.mesh import AXES, LayerKind, Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchscout.checkpoint.state.training_state import Stateful

__all__ = ["TorchTitanAdapter", "adapter_of"]

_DENSE = {"pp": "pipeline", "dp_replicate": "replica", "dp_shard": "shard", "cp": "context", "tp": "tensor"}
_SPARSE = {"pp": "pipeline", "dp_replicate": "replica", "efsdp": "shard", "ep": "expert"}
"""How TorchTitan lays ranks out, slowest axis first, for experts apart; and our names for its axes."""
_FOLDED = {
    "fsdp": ("shard", "context"),
    "batch": ("replica", "shard"),
    "dp": ("replica", "shard"),
    "loss": ("replica", "shard", "context"),
}
"""Its names for several axes as one."""


def adapter_of(job: Any, optimizer: Any, parallelism: Any) -> TorchTitanAdapter | None:
    """The adapter, if the job is a Trainer."""
    if not isinstance(job, Trainer):
        return None
    if optimizer is not None or parallelism is not None:
        raise ValueError("a Trainer knows its optimizers and its parallelism; pass the Trainer alone")
    return TorchTitanAdapter(job)


class TorchTitanAdapter(PyTorchAdapter):
    """What a trainer trains, on the meshes that it built."""

    def __init__(self, trainer: Trainer) -> None:
        parts = trainer.model_parts
        model = parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)
        super().__init__(model, tuple(trainer.optimizers), None)
        self._trainer = trainer
        self._progress = _Progress(trainer)

    @property
    def obstacle(self) -> str | None:
        if why := unknown("torchtitan", torchtitan.__version__):
            return why
        config = self._trainer.config
        if not config.training.disable_cuda_graphs:
            return "CUDA graphs call no hooks; pass --training.disable_cuda_graphs"
        if config.parallelism.spmd_backend == "spmd_types":
            return (
                "layers under spmd_types can only be called within TorchTitan's own step; "
                "pass --parallelism.spmd_backend partial_dtensor"
            )
        return None

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


class _Position:
    """Where a loader is in its data; it can be iterated over, as it is a loader that this stands for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        self._loader.load_state_dict(state)
        # The loader draws a seed when it begins, which it does here at the latest: random streams are put
        # back after this.
        self._loader.state_dict()


class _Schedule:
    """The learning rates' schedules as state: being iterable, their container would pass for a loader."""

    def __init__(self, schedulers: Any) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> Any:
        return self._schedulers.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        self._schedulers.load_state_dict(state)


class _Progress:
    """How far a trainer is, as of its last update: it counts the next step before that begins."""

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
    """The address of every rank, the last axis varying fastest."""
    sizes = tuple(degrees.values())
    table = np.zeros((int(np.prod(sizes)), len(AXES)), dtype=np.int64)
    for axis, places in zip(degrees, np.indices(sizes), strict=True):
        table[:, AXES.index(axis)] = places.flatten()
    return table


def _check(mesh: Mesh, dims: Any) -> None:
    """A ``ValueError`` where TorchTitan's own groups say otherwise."""
    rank = dist.get_rank()
    for name, devices in dims.get_all_one_dimensional_meshes().items():
        role = LayerKind.EXPERT if name in ("ep", "efsdp") else LayerKind.DENSE
        axis = (_SPARSE if role is LayerKind.EXPERT else _DENSE).get(name)
        axes = _FOLDED.get(name, ()) if axis is None else (axis,)
        own, told = [rank], devices.mesh.flatten().tolist()
        for each in axes:
            own = [other for one in own for other in mesh.ranks_along(each, one, role)]
        if axes and sorted(own) != told:
            raise ValueError(
                f"TorchTitan {torchtitan.__version__} lays ranks out otherwise than 0.3.0 does: rank {rank} "
                f"has {told} along {name!r}, and {sorted(own)} were expected"
            )
