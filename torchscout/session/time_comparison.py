"""Compares the times of one check, on every rank or on rank 0 alone (paper, sections 5.4 and 6.1.2).

In a job of one group of ranks, every rank receives all times and concludes the same. In a larger one, and
unless every comparison is recorded, rank 0 does so for all. The others only need to know what to time again,
and rank 0 reports what it finds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchscout.communicators import Communicators
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.straggler.diagnosis import Slowness, Stragglers
from torchscout.decision.straggler.measured import Measured, encode, tables
from torchscout.decision.straggler.timings import Timings
from torchscout.decision.tree import Runs
from torchscout.mesh import Mesh

__all__ = ["TimeComparison"]

_LENGTH = struct.Struct("<I")


class TimeComparison:
    """The times of this rank among those of the job."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        communicators: Communicators,
        straggler: StragglerConfig,
        baseline: BaselineConfig,
        *,
        by_all: bool,
        guard: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``by_all`` if every rank records its comparisons; ``guard`` returns None if a function raises."""
        self._mesh, self._communicators, self._guard = mesh, communicators, guard
        self._config, self._by_all = straggler, by_all
        self._new_stragglers = partial(Stragglers, mesh, rank, straggler, baseline)
        self.start_over()

    def start_over(self) -> None:
        """Forget the times of earlier checks."""
        self._stragglers = self._new_stragglers()
        self._timings: Timings | None = None

    def doubted(self, step: int, measured: Sequence[Measured]) -> set[str | None]:
        """Return the layers that look slow, on all ranks alike; see ``Replayer.doubted``."""
        timings, doubted = self._exchange(step, measured)
        self._timings = None if doubted else timings
        return doubted

    def timings(self, step: int, measured: Sequence[Measured]) -> Timings:
        """Return the times of this check, after ``doubted``. Exchanges them if some were measured again."""
        known, self._timings = self._timings, None
        return self._exchange(step, measured)[0] if known is None else known

    def observe(self, timings: Timings) -> Slowness:
        """Add the times of one check."""
        return self._stragglers.observe(timings)

    @property
    def reports_all(self) -> bool:
        """Whether this rank reports every incident of its ``observe``, since no other rank finds any."""
        return not self._is_judged_by_all

    @property
    def _is_judged_by_all(self) -> bool:
        return self._by_all or not self._communicators.is_tree

    def _exchange(self, step: int, measured: Sequence[Measured]) -> tuple[Timings, set[str | None]]:
        layout, column = encode(measured, self._mesh)
        if self._is_judged_by_all:
            gathered = self._communicators.gather(_LENGTH.pack(len(layout)) + layout + column)
            parts = [*map(_split, gathered)]
            received = [Runs.joined([Runs.of(each) for each in part]) for part in zip(*parts, strict=True)]
            timings = self._decoded(step, received)
            return timings, self._stragglers.layers_to_time_again(timings)
        timings = Timings(step, self._mesh, (), self._config)  # rank 0 alone has any

        def answer(received: list[Runs]) -> bytes:
            nonlocal timings
            timings = self._guard(lambda: self._decoded(step, received)) or timings
            doubted = self._guard(lambda: [*self._stragglers.layers_to_time_again(timings)]) or []
            return json.dumps(doubted).encode()

        doubted = {*json.loads(self._communicators.consult([layout, column], answer))}
        return timings, doubted

    def _decoded(self, step: int, received: Sequence[Runs]) -> Timings:
        layouts, columns = received
        return Timings(step, self._mesh, tables(layouts, columns), self._config)


def _split(payload: bytes) -> tuple[bytes, bytes]:
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return payload[_LENGTH.size : end], payload[end:]
