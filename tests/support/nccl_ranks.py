"""NCCL ranks that train with a framework on a CUDA device, and their results.

Neither the test process nor the server that ranks are forked from may import the framework: importing
Megatron-Core asks CUDA for its devices, and a process that has asked cannot be forked. So a rank imports it
by itself, and what it tells can be read without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.findings import Findings
from tests.support.hangs import resolutions
from tests.support.ranks import LiveRanks, RankError
from torchscout.config import BaselineConfig, ObserverConfig, ReplayConfig, StragglerConfig
from torchscout.decision.types import Incident

STEPS, FAULTY_STEP, STALL = 12, 6, 10.0
"""A stall outlasts the threshold by far, and ends: the job then goes on."""
# Ranks that share a device do not share it evenly: one of them may really be slower for a while.
UNEVEN = ReplayConfig(
    straggler=StragglerConfig(min_slowdown_ms=100.0), baseline=BaselineConfig(min_slowdown_ms=100.0)
)
CHECKED, EVERY_STEP = replace(UNEVEN, interval=2), replace(UNEVEN, interval=1)
# Quick, for a hang that is there; a healthy job is watched as by default.
WATCHED = ObserverConfig(
    min_silence_seconds=2.0, silence_multiple=2.0, startup_seconds=120.0, grace_seconds=8.0
)


@dataclass(frozen=True)
class Seen(Findings):
    """The findings of one rank, and the state that training left on it."""

    bits: dict[Any, str]

    @classmethod
    def of(cls, result: Any) -> Seen:
        """Convert the result of a framework's own support module."""
        return cls(**{each.name: getattr(result, each.name) for each in fields(cls)})


def needs(package: str) -> pytest.MarkDecorator:
    """Skip if the package is not installed. A package that is installed and cannot be imported fails."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


class NcclRanks:
    """Ranks that answer one question after another, and are replaced after a failure."""

    def __init__(
        self, body: Callable[..., Iterator[Any]], size: int, *args: Any, backend: str = "nccl"
    ) -> None:
        self._body, self._size, self._args, self._backend = body, size, args, backend
        self._live: LiveRanks | None = None

    def ask(self, question: Any, timeout: float = 180.0) -> list[Seen]:
        if self._live is None:
            self._live = LiveRanks(self._body, self._size, *self._args, backend=self._backend)
        try:
            return self._live.ask(question, timeout)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None


@contextmanager
def started(body: Callable[..., Iterator[Any]], size: int, *args: Any) -> Iterator[NcclRanks]:
    ranks = NcclRanks(body, size, *args)
    try:
        yield ranks
    finally:
        ranks.close()


def is_silent(seen: Seen, layers: tuple[str, ...], steps: int = STEPS) -> None:
    """Check that a healthy job of this many steps was checked as in ``CHECKED`` and certified to its end."""
    assert ([each.sentence for each in seen.incidents], seen.failures) == ([], [])
    assert seen.status["step"] == steps
    replay = seen.status["replay"]
    assert (replay["checks"], replay["certified"]) == (steps // 2, steps), replay
    assert {f"{layer}/output" for layer in layers} <= seen.agreed, (replay["not_checked"], seen.unchecked)
    assert {"optimizer/update", "state/owned"} <= seen.agreed, (replay["not_checked"], seen.unchecked)


def has_named(results: list[Seen], rank: int, manifestation: str) -> Incident:
    """Check that exactly one fault fired, on this rank, and that exactly this rank is named."""
    assert [bool(each.fired) for each in results] == [each == rank for each in range(len(results))]
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == (
        manifestation,
        "rank",
        (rank,),
    ), incident.sentence
    return incident


def went_on(results: list[Seen], run_dir: Path) -> None:
    """Check that all ranks trained to the end after a stall of rank 1, and that its end was recorded."""
    assert [(each.status["step"], each.failures) for each in results] == [(STEPS, [])] * len(results)
    (resolved,) = resolutions(run_dir)
    assert resolved.ranks == (1,)
    assert resolved.stalled_seconds > WATCHED.min_silence_seconds
