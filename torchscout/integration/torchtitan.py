"""TorchTitan 0.3: its trainer as a job, and a way in without a change to config or loop (paper, section 9).

TorchTitan builds its checkpoint manager last, gives it the trainer, and tells it when training starts and
ends: an override of that manager is where SCOUT comes in. What FSDP2 and tensor parallelism do underneath is
plain PyTorch and known to ``pytorch``. Earlier releases are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torchtitan
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.trainer import Trainer

from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.integration.pytorch import PyTorchAdapter, around_steps
from torchscout.integration.versions import unknown
from torchscout.mesh import AXES, LayerKind, Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchscout.checkpoint.state import Stateful
    from torchscout.integration.resumption import Resumption
    from torchscout.integration.session import Session

__all__ = ["Resiliency", "TorchTitanAdapter", "adapter_of", "resiliency"]

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

    def at_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        def updated() -> None:
            self._progress.note()
            after()

        return around_steps([self._trainer.optimizers], before, updated)

    def state(self) -> Mapping[str, Stateful]:
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


class Resiliency(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is seen as Any where it is absent
    """The job's own checkpoint manager, with a session around it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """That of the manager it stands for, and what to attach."""

        manager: Any
        """The config of the job's own manager."""
        settings: dict[str, Any] = field(default_factory=dict)
        """What is given to ``enable_resiliency``."""

        def to_dict(self) -> dict[str, Any]:
            return dict(self.manager.to_dict())

    def __init__(self, config: Config, *, states: Mapping[str, Any], **given: Any) -> None:
        from torchscout.integration.attach import enable_resiliency

        trainers = [each for each in states.values() if isinstance(each, Trainer)]
        if len(trainers) != 1:
            raise ValueError(f"found no Trainer among the states to checkpoint, {', '.join(states)}")
        self.enable, self._config = True, config
        self.manager = config.manager.build(states=states, **given)
        """The job's own."""
        (self._trainer,) = trainers
        self.session: Session = enable_resiliency(self._trainer, **config.settings)
        self.resumption: Resumption | None = None
        """What training went on from, once it has begun; None without checkpoints of ours."""

    @property
    def save_future(self) -> Any:
        return getattr(self.manager, "save_future", None)

    def _load(self, step: int = -1) -> bool:
        """What checks have certified comes last, and wins over what TorchTitan has written itself."""
        with self.session.checkpoint_io("read"):
            is_loaded = bool(self.manager.load(step))
        if self.session.checkpointing is not None:
            self.resumption = self.session.resume()
        if self.resumption is not None and self.resumption.role is not None:
            return True
        if is_loaded:
            self.session.go_on_from(self._trainer.step)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Asked after every step; most are none at which a manager writes."""
        is_due = self._config.enable and (last_step or curr_step % self._config.interval == 0)
        with self.session.checkpoint_io("write") if is_due else nullcontext():
            return bool(self.manager.save(curr_step, last_step))

    def _maybe_wait_for_staging(self) -> None:
        self.manager.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self.manager.maybe_wait_for_saving()

    def _close(self) -> None:
        self.manager.close()
        if sys.exc_info()[0] is None:  # a job that fails has not finished, and observers are to see that
            self.session.close()


@override(target=BaseCheckpointManager.Config, description="SCOUT around the job")  # type: ignore[untyped-decorator]
def resiliency(
    manager: Any,
    *,
    replay: Mapping[str, Any] | None = MappingProxyType({}),
    observer: Mapping[str, Any] | None = MappingProxyType({}),
    checkpoint: Mapping[str, Any] | None = None,
    run_dir: str | None = None,
) -> Any:
    """For ``--override.imports``: attach to the trainer with these fields of the configurations."""
    settings = {
        "replay": None if replay is None else ReplayConfig(**_tuples(replay)),
        "observer": None if observer is None else ObserverConfig(**_tuples(observer)),
        "checkpoint": None if checkpoint is None else CheckpointConfig(**_tuples(checkpoint)),
        "run_dir": run_dir,
    }
    return derive(manager, Resiliency.Config, manager=manager, settings=settings)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON writes as a list."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}


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
