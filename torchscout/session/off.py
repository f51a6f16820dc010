"""``TORCHSCOUT=off``: run a job without torchscout by setting an environment variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchscout.log import log
from torchscout.session.boundary import Boundary
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Parts, Session

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["VARIABLE", "Off", "is_off"]

VARIABLE = "TORCHSCOUT"
_OFF, _ON = {"off", "0", "false", "no"}, {"", "on", "1", "true", "yes"}
_REASON = f"the environment variable {VARIABLE} switches torchscout off"


def is_off() -> bool:
    """Read the environment variable; raises ``ValueError`` for a value that is neither on nor off."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in _OFF | _ON:
        raise ValueError(f"the environment variable {VARIABLE} must be on or off, got {value!r}")
    return value in _OFF


class Off(Session):
    """A session whose methods all work and do nothing. It needs no process group."""

    def __init__(self) -> None:
        super().__init__(Parts(run_dir=Path(os.devnull), boundary=Boundary(), replay_off=_REASON))
        self._end_once.acquire()  # there is nothing to log at the end
        self._has_ended.set()
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("off: %s", _REASON)

    def register_state(self, name: str, stateful: Stateful) -> None: ...

    def resume(self, *, start_over: bool = False, layout: str | None = None) -> Resumption:  # noqa: ARG002
        return Resumption(0, None, None, f"There is no checkpoint to resume from: {_REASON}.")

    def start_from(self, step: int) -> None: ...

    def change_observer(self, **settings: float) -> None: ...

    def step_finished(self) -> None: ...
