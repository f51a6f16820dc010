"""Attaches to TorchTitan without a change to config or loop, by overriding its checkpoint manager.

TorchTitan builds that manager last, passes it the trainer, and calls it when training starts and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.trainer import Trainer

from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig

if TYPE_CHECKING:
    from torchscout.session.checkpoints.resumption import Resumption
    from torchscout.session.session import Session

__all__ = ["Resiliency", "resiliency"]


class Resiliency(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is seen as Any where it is absent
    """Wraps the job's own checkpoint manager, and holds a session."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The config of the wrapped manager, and the arguments for ``enable_resiliency``."""

        manager: Any
        """The config of the job's own manager."""
        settings: dict[str, Any] = field(default_factory=dict)
        """The arguments for ``enable_resiliency``."""

        def to_dict(self) -> dict[str, Any]:
            return dict(self.manager.to_dict())

    def __init__(self, config: Config, *, states: Mapping[str, Any], **given: Any) -> None:
        trainers = [each for each in states.values() if isinstance(each, Trainer)]
        if len(trainers) != 1:
            raise ValueError(f"expected one Trainer among the states to checkpoint: {', '.join(states)}")
        self.enable, self._config = True, config
        self.manager = config.manager.build(states=states, **given)
        """The job's own manager."""
        (self._trainer,) = trainers
        self.session: Session = enable_resiliency(self._trainer, **config.settings)
        self.resumption: Resumption | None = None
        """Where training continued from, once it has begun; None without SCOUT's checkpoints."""

    @property
    def save_future(self) -> Any:
        return getattr(self.manager, "save_future", None)

    def _load(self, step: int = -1) -> bool:
        """Load the job's own checkpoint, then SCOUT's: certified state takes precedence."""
        with self.session.checkpoint_io("read"):
            is_loaded = bool(self.manager.load(step))
        if self.session.status()["checkpoint"] is not None:
            self.resumption = self.session.resume()
        if self.resumption is not None and self.resumption.role is not None:
            return True
        if is_loaded:
            self.session.start_from(self._trainer.step)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Called after every step; the manager writes in few of them."""
        is_due = self._config.enable and (last_step or curr_step % self._config.interval == 0)
        with self.session.checkpoint_io("write") if is_due else nullcontext():
            return bool(self.manager.save(curr_step, last_step))

    def _maybe_wait_for_staging(self) -> None:
        self.manager.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self.manager.maybe_wait_for_saving()

    def _close(self) -> None:
        self.manager.close()
        if sys.exc_info()[0] is None:  # observers have to see that a failing job has not finished
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
    """Attach to the trainer with these fields of the configurations; for ``--override.imports``."""
    settings = {
        "replay": None if replay is None else ReplayConfig(**_tuples(replay)),
        "observer": None if observer is None else ObserverConfig(**_tuples(observer)),
        "checkpoint": None if checkpoint is None else CheckpointConfig(**_tuples(checkpoint)),
        "run_dir": run_dir,
    }
    return derive(manager, Resiliency.Config, manager=manager, settings=settings)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists, in which JSON writes tuples."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
