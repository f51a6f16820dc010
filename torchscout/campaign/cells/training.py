"""What the ranks of all cells have in common: their training, a quiet log, and a start that is retried."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from torchscout.campaign.cells.cell import JobLayout
from torchscout.config import ReplayConfig
from torchscout.testing.local_ranks import RankError
from torchscout.testing.transformer import TINY, Training

__all__ = ["device_of", "is_busy", "replay_on", "retried", "silence_log", "training_of"]

_BUSY = re.compile(r"busy or unavailable|[Ee]rror:? 80[5-8]\b|MPS (client|server)")
_TRIES, _PAUSE_SECONDS = 8, 3.0
_SHARED_MS = 20.0
_Value = TypeVar("_Value")


def training_of(layout: JobLayout, seed: int = 0) -> Training:
    """This rank's share of the small Transformer, laid out as ``layout`` says."""
    return Training(
        TINY,
        replica=layout.replica,
        shard=layout.shard,
        tensor=layout.tensor,
        seed=seed,
        device=device_of(layout),
    )


def device_of(layout: JobLayout) -> torch.device:
    """Where this rank computes. On CUDA it becomes the current device; several ranks may share one."""
    if layout.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def replay_on(layout: JobLayout, replay: ReplayConfig) -> ReplayConfig:
    """These settings; on CUDA, slowdowns below 20 ms are not reported.

    Ranks that share a device delay each other by a few milliseconds at random, as long as the layers of the
    campaign's small model take. Injected delays are 250 ms.
    """
    if layout.device == "cpu":
        return replay
    return replace(
        replay,
        straggler=replace(
            replay.straggler, min_slowdown_ms=max(_SHARED_MS, replay.straggler.min_slowdown_ms)
        ),
        baseline=replace(replay.baseline, min_slowdown_ms=max(_SHARED_MS, replay.baseline.min_slowdown_ms)),
    )


def silence_log() -> None:
    """Keep torchscout's log lines off the terminal: the campaign itself reports what was found."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())


def is_busy(error: RankError) -> bool:
    """Whether a rank failed because the device does not accept new processes now."""
    return any(_BUSY.search(failure) for failure in error.failures.values())


def retried(
    start: Callable[[], _Value], *, tries: int = _TRIES, pause_seconds: float = _PAUSE_SECONDS
) -> _Value:
    """Return ``start()``; call it again after a pause for as long as the device is busy."""
    for _ in range(tries - 1):
        try:
            return start()
        except RankError as error:
            if not is_busy(error):
                raise
        time.sleep(pause_seconds)
    return start()
