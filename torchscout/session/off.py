"""``TORCHSCOUT=off``: the job as it is without torchscout, by an environment variable."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchscout.log import log
from torchscout.session.resumption import Resumption
from torchscout.session.session import Session

if TYPE_CHECKING:
    from torchscout.checkpoint.state.training_state import Stateful

__all__ = ["VARIABLE", "Off", "is_off"]

VARIABLE = "TORCHSCOUT"
_OFF, _ON = {"off", "0", "false", "no"}, {"", "on", "1", "true", "yes"}
_REASON = f"the environment variable {VARIABLE} switches torchscout off"


def is_off() -> bool:
    """What the environment says; ``ValueError`` for a word that means neither."""
    said = os.environ.get(VARIABLE, "").strip().lower()
    if said not in _OFF | _ON:
        raise ValueError(f"the environment variable {VARIABLE} is on or off, got {said!r}")
    return said in _OFF


class Off(Session):
    """A session of which every method works and does nothing. It needs no process group."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), ExitStack())
        self._has_ended = True  # there is nothing to say at the end
        self.not_replaying = _REASON
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("off: %s", _REASON)

    def register_state(self, name: str, stateful: Stateful) -> None:
        """Nothing is kept."""

    def resume(self, *, start_over: bool = False) -> Resumption:  # noqa: ARG002
        """There is nothing to go back to."""
        return Resumption(0, None, None, f"There is no checkpoint to go back to: {_REASON}.")

    def start_from(self, step: int) -> None:
        """Nothing is counted."""

    def change_observer(self, **settings: float) -> None:
        """There is no observer."""

    def change_replay(self, **settings: Any) -> None:
        """There is no replay."""

    def step_finished(self) -> None:
        """Nothing is counted."""
