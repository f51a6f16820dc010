"""Reads the open operations from PyTorch's Flight Recorder, if one runs in this trainer.

They are shown with an incident, but not compared. Only a trainer that has been silent for long reads them:
the recorder asks the CUDA driver about each open operation while it holds the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torchscout.decision.flight_recorder import Dump, Entry, State, read_dump
from torchscout.log import log
from torchscout.utils._torch import dump_flight_recorder, dump_nccl_flight_recorder

__all__ = ["open_operations"]

_RECORDERS = (dump_nccl_flight_recorder, dump_flight_recorder)
"""For NCCL, and for other backends; which ones exist depends on how PyTorch was built."""
_SHOWN = 16


def open_operations() -> dict[str, Any] | None:
    """Return the first open operations as a few kilobytes of plain JSON; None without a recorder."""
    dumps = [dump for recorder in _RECORDERS if (dump := _dump(recorder)) is not None]
    if not dumps:
        return None
    waiting = [
        entry
        for dump in dumps
        for entry in dump.entries
        if entry.state in (State.SCHEDULED, State.STARTED) and entry.operation != "coalesced"
    ]
    return {"open": len(waiting), "operations": [_shown(each) for each in waiting[:_SHOWN]]}


def _dump(recorder: Callable[..., bytes | str] | None) -> Dump | None:
    """Return a dump of the operations that are open; None if nothing was ever recorded."""
    if recorder is None:
        return None
    try:
        document = json.loads(recorder(includeCollectives=True, onlyActive=True))
        return read_dump(0, document) if document.get("entries") or document.get("pg_status") else None
    except (RuntimeError, TypeError, ValueError) as error:
        log.warning("cannot read the Flight Recorder: %s", error)
        return None


def _shown(entry: Entry) -> dict[str, Any]:
    return {
        "group": entry.group[1] or entry.group[0],
        "number": entry.sequence,
        "operation": entry.text,
        "state": entry.state.value,
        "created": entry.created,
    }
