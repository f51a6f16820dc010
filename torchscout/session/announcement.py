"""The first lines of the log: where the run directory is, and what is detected."""

from __future__ import annotations

import logging

from torchscout.communicators import Job
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.decision.types import Started
from torchscout.log import log
from torchscout.run.writer import record_one
from torchscout.session.session import Parts

__all__ = ["ALONE", "announce"]

ALONE = (
    "No two ranks of this job do the same work, so wrong results of layers and updates cannot be found; "
    "state that changes between updates is found, and so are transfers that arrive damaged"
)


def announce(
    parts: Parts,
    job: Job,
    observer: ObserverConfig | None,
    replay: ReplayConfig | None,
    checkpoint: CheckpointConfig | None,
    *,
    has_model: bool,
) -> None:
    """Log once, on rank 0, where the run directory is and which subsystems are on."""
    ranks, hosts = len(job.mesh), len(set(job.hosts))
    size = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} machine{'s' * (hosts > 1)}"
    started = Started(step=0, sentence=f"torchscout was attached to {size}.")
    if job.rank == 0 or job.copies_from(0):
        parts.boundary.guarded(lambda: record_one(job.run_dir, job.rank, started))
    if job.rank:
        return
    log.info("attached to %s; run directory: %s", size, job.run_dir)
    if parts.monitor is None or observer is None:
        why = "observer=None" if observer is None else parts.boundary.failures[-1]
        log.warning("hang detection is off: %s", why)
    else:
        limits = observer.min_silence_seconds, observer.silence_multiple
        log.info(
            "hang detection is on: a rank may be silent for %g s, or %g steps if that is longer", *limits
        )
    if not has_model:
        log.info("corrupted numbers and slow ranks are not detected yet: no model is attached")
        return
    if parts.replay is None or replay is None:
        log.warning("corrupted numbers and slow ranks are not detected: %s", parts.replay_off)
    else:
        lacking, covered = parts.replay.driver.lacking, parts.replay.driver.covered().sentence()
        level = logging.WARNING if lacking == ALONE else logging.INFO
        interval = min(replay.intervals.values())
        often = "step" if interval == 1 else f"{interval} steps"
        log.log(level, "checks every %s: %s%s", often, covered, f" {lacking}." if lacking else "")
    if checkpoint is None:
        log.info("checkpoints are off: checkpoint=None")
    else:
        log.info(
            "certified state is kept in memory and written to %s from time to time", checkpoint.directory
        )
