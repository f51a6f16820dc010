"""Starts ranks again where a CUDA device refuses new processes for a while.

Ranks that share a device are clients of one MPS server. After one of them was killed the server recovers for
some seconds, and refuses new clients meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

from torchscout.cli.local_ranks import RankError

__all__ = ["is_busy", "retried"]

_BUSY = re.compile(r"busy or unavailable|[Ee]rror:? 80[5-8]\b|MPS (client|server)")
_TRIES, _PAUSE_SECONDS = 8, 3.0
_Value = TypeVar("_Value")


def is_busy(error: RankError) -> bool:
    """Whether a rank failed because the device takes no new processes now."""
    return any(_BUSY.search(failure) for failure in error.failures.values())


def retried(
    start: Callable[[], _Value], *, tries: int = _TRIES, pause_seconds: float = _PAUSE_SECONDS
) -> _Value:
    """What ``start`` returns; it is called again after a pause as long as the device is busy."""
    try:
        return start()
    except RankError as error:
        if tries <= 1 or not is_busy(error):
            raise
    time.sleep(pause_seconds)
    return retried(start, tries=tries - 1, pause_seconds=pause_seconds)
