"""The observer's end of a trainer's progress record, which ``writer`` publishes (paper, section 7).

It never waits for the trainer; see ``layout``, [Note: never torn].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, Window
from torchscout.errors import TornRecordError
from torchscout.observer.record import directory, layout
from torchscout.observer.record.layout import Declarations, Head, Memory, Operation

__all__ = ["ProgressReader"]

_ATTEMPTS = 100
_DEVICE_SECONDS = 2.0
"""After this long, what is known of a device's progress may be out of date."""
_MARGIN = 16
"""Operations that a trainer may issue while its record is read."""


class ProgressReader:
    """Reads a progress record, also after the trainer or the file is gone."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` or ``ValueError`` if the file is not a record of this user."""
        self.path = path
        memory, self.rank, self._trainer = directory.open_record(path)
        self._memory = Memory(memory)
        self._declarations = Declarations()

    @property
    def pid(self) -> int:
        return self._trainer.pid

    @property
    def paused(self) -> bool:
        return bool(self._memory.words[layout.PAUSED])

    @property
    def has_finished(self) -> bool:
        return self._memory.words[layout.FINISHED] == 1

    @property
    def is_exiting(self) -> bool:
        """Whether the trainer's interpreter had begun to exit."""
        return self._memory.words[layout.FINISHED] == layout.EXITING

    @property
    def is_failing(self) -> bool:
        """Whether an exception ends the trainer."""
        return self._memory.words[layout.FINISHED] == layout.FAILING

    @property
    def is_asked(self) -> bool:
        """Whether SIGTERM ends the trainer."""
        return self._memory.words[layout.FINISHED] == layout.ASKED

    @property
    def is_restarting(self) -> bool:
        """Whether the trainer leaves because it was decided to restart or to stop the job."""
        return self._memory.words[layout.FINISHED] == layout.RESTARTING

    @property
    def dropped(self) -> int:
        """Number of groups without room, and of errors that ended the publication of collectives; unless it
        is 0, some communication may be missing here."""
        return self._memory.words[layout.DROPPED]

    def trainer(self) -> Process:
        """Return the state of the trainer's process."""
        return self._trainer.process()

    def operations(self, step: int) -> dict[str, Any] | None:
        """Return the output of the Flight Recorder if it was read during a silence in this step."""
        try:
            shown: dict[str, Any] = json.loads(directory.operations_of(self.path).read_text())
        except (OSError, ValueError):  # none was written, or it is being written right now
            return None
        return shown if shown.get("step") == step else None

    def groups(self) -> dict[str, CommGroup]:
        return {line.key: line for line in self._declared().lines}

    def step_seconds(self) -> list[float]:
        """Return the durations of recent steps, oldest first."""
        return self._memory.noted(layout.STEPS)

    def phase_seconds(self, phase: Phase) -> list[float]:
        """Return recent durations of a phase, oldest first."""
        return self._memory.noted(layout.CODES[phase])

    def read(self, now: float | None = None) -> Progress:
        """Return the trainer's progress at the monotonic time ``now``, also after it died during a write.

        Raises ``TornRecordError`` if the trainer publishes too fast to be read, so that it is alive.
        """
        for _ in range(_ATTEMPTS):
            progress = self._attempt(now)
            if progress is not None:
                return progress
        raise TornRecordError(f"{self.path}: no consistent record in {_ATTEMPTS} attempts")

    def glance(self, now: float | None = None) -> Progress | None:
        """Return the progress without operations, at a hundredth of the cost of ``read``.

        Returns None in the rare moment when neither head is valid.
        """
        head = self._memory.head()
        if head is None:
            return None
        return self._progress(head, {}, [], monotonic() if now is None else now)

    def _attempt(self, now: float | None) -> Progress | None:
        """Return None if the writer was too fast."""
        before = self._memory.head()
        counts = self._memory.counts[: len(self._declared().lines)].tolist()
        head = self._memory.head()
        # A count may be out of date by operations since ``before``: the ring must have them all.
        if before is None or head is None or head.issued - before.issued >= layout.RECENT:
            return None
        orders = range(max(1, head.issued - layout.RECENT + 1), head.issued + 1)
        recent = [operation for order in orders if (operation := self._memory.operation(order))]
        declared = self._declared()
        if len(recent) < len(orders) or not all(declared.has(each.line, each.phrase) for each in recent):
            return None
        counts += [0] * (len(declared.lines) - len(counts))
        for operation in recent:
            counts[operation.line] = operation.number
        now = monotonic() if now is None else now
        entered = self._entered(counts, now)
        recent = [*self._near_device(orders.start, entered, declared), *recent]
        keys = [line.key for line in declared.lines]
        progress = self._progress(head, dict(zip(keys, counts, strict=True)), recent, now)
        return replace(progress, entered={keys[line]: number for line, number in entered.items()})

    def _entered(self, counts: Sequence[int], now: float) -> dict[int, int]:
        """Return what the device has reached on each line where that is known.

        A trainer that has not asked its device for a while cannot tell: it may be stopped, or hold the
        interpreter's lock. But a device that had reached everything cannot have fallen behind a host that has
        issued nothing since.
        """
        asked = self._memory.words[layout.DEVICE_ASKED] / 1000
        is_fresh = now - asked < _DEVICE_SECONDS
        return {
            line: min(number, counts[line])
            for line, number in enumerate(self._memory.entered[: len(counts)].tolist())
            if number != layout.UNKNOWN and (is_fresh or number >= counts[line])
        }

    def _near_device(
        self, before: int, entered: Mapping[int, int], declared: Declarations
    ) -> Iterator[Operation]:
        """Yield operations issued ``before`` the recent ones that devices have just reached, with their
        neighbours."""
        oldest = max(1, before + layout.RECENT - layout.PLACES + _MARGIN)
        for order in range(oldest, before) if entered else ():
            found = self._memory.operation(order)
            if found is not None and declared.has(found.line, found.phrase):
                number = entered.get(found.line)
                if number is not None and abs(found.number - number) <= 1:
                    yield found

    def _progress(self, head: Head, issued: dict[str, int], recent: list[Operation], now: float) -> Progress:
        device_step, busy = self._memory.words[layout.DEVICE_STEP], self._memory.words[layout.DEVICE_BUSY]
        return Progress(
            rank=self.rank,
            step=head.step,
            operation=head.operation,
            phase=layout.PHASES[head.phase],
            issued=issued,
            recent=Window([self._issued(operation) for operation in recent]),
            at_communication=bool(head.at_communication),
            silent_seconds=max(0.0, now - head.time),
            device_step=None if device_step < 0 else device_step,
            device_busy=None if busy < 0 else bool(busy),
            captured=self._memory.words[layout.CAPTURED],
        )

    def _issued(self, operation: Operation) -> IssuedOp:
        declared, phrase = self._declarations, operation.phrase
        return IssuedOp(
            group=declared.lines[operation.line].key,
            number=operation.number,
            fingerprint=operation.fingerprint,
            digest=operation.digest,
            text=declared.phrases[phrase] if phrase >= 0 else f"unlisted {operation.fingerprint:016x}",
            sends=operation.sends,
            receives=operation.receives,
        )

    def _declared(self) -> Declarations:
        self._declarations.extend(self._memory.appended(self._declarations.length))
        return self._declarations
