"""The observer's end of a trainer's progress record, which ``writer`` publishes (paper, section 7).

It never waits for the trainer: see ``layout``, [Note: never torn]. What a coordinate means for a hang, and
when silence is too long, is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress
from torchscout.errors import TornRecordError
from torchscout.observer.record import directory, layout
from torchscout.observer.record.layout import Declarations, Head, Memory, Operation

__all__ = ["ProgressReader"]

_ATTEMPTS = 100
_DEVICE_SECONDS = 2.0
"""After this long, what a device was last known to have come to may be out of date."""
_MARGIN = 16
"""Operations that a trainer may issue while its record is read."""


class ProgressReader:
    """The observer's end. It reads on when the trainer is gone, or the file."""

    def __init__(self, path: Path) -> None:
        """A ``ValueError`` names a file that is no record of this user."""
        self.path = path
        memory, self.rank, self._trainer = directory.open_record(path)
        self._memory = Memory(memory)
        self._journal = Declarations()

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
        """Its interpreter was about to end."""
        return self._memory.words[layout.FINISHED] == layout.EXITING

    @property
    def dropped(self) -> int:
        """Declarations without room: while this is not 0, there may be communication not told of here."""
        return self._memory.words[layout.DROPPED]

    def trainer(self) -> Process:
        return self._trainer.process()

    def operations(self, step: int) -> dict[str, Any] | None:
        """What the Flight Recorder said when the trainer fell silent in this step; None if it said
        nothing."""
        try:
            shown: dict[str, Any] = json.loads(directory.operations_of(self.path).read_text())
        except (OSError, ValueError):  # none was written, or is being written right now
            return None
        return shown if shown.get("step") == step else None

    def lines(self) -> dict[str, CommGroup]:
        return {line.key: line for line in self._declared().lines}

    def step_seconds(self) -> list[float]:
        """Recent steps, oldest first."""
        return self._memory.noted(layout.STEPS)

    def phase_seconds(self, phase: Phase) -> list[float]:
        """Recent sampled durations of a phase, oldest first."""
        return self._memory.noted(layout.CODES[phase])

    def read(self, now: float | None = None) -> Progress:
        """Where the trainer stands; ``now`` is a monotonic time.

        Also after it died in the middle of a write. ``TornRecordError`` means that it lives and has,
        many times in a row, published faster than one could read.
        """
        for _ in range(_ATTEMPTS):
            progress = self._attempt(now)
            if progress is not None:
                return progress
        raise TornRecordError(f"{self.path}: no whole record in {_ATTEMPTS} attempts")

    def glance(self, now: float | None = None) -> Progress | None:
        """What one polls for, at a hundredth of the price of ``read``: nothing of the operations.

        None in the rare moment when neither head is whole.
        """
        head = self._memory.head()
        if head is None:
            return None
        return self._progress(head, {}, [], monotonic() if now is None else now)

    def _attempt(self, now: float | None) -> Progress | None:
        """None if the writer was too fast."""
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
        recent = [*self._where_devices_are(orders.start, entered, declared), *recent]
        keys = [line.key for line in declared.lines]
        progress = self._progress(head, dict(zip(keys, counts, strict=True)), recent, now)
        return replace(progress, entered={keys[line]: number for line, number in entered.items()})

    def _entered(self, counts: Sequence[int], now: float) -> dict[int, int]:
        """Per line, what the device has come to, where that is known.

        A trainer that has not asked for a while cannot tell: it may be stopped, or hold the interpreter's
        lock. But a device that had come to everything then cannot have fallen behind a host that issued
        nothing since.
        """
        asked = self._memory.words[layout.DEVICE_ASKED] / 1000
        is_fresh = now - asked < _DEVICE_SECONDS
        found = enumerate(self._memory.entered[: len(counts)].tolist())
        return {
            line: min(number, counts[line])
            for line, number in found
            if number != layout.UNKNOWN and (is_fresh or number >= counts[line])
        }

    def _where_devices_are(
        self, before: int, entered: Mapping[int, int], declared: Declarations
    ) -> Iterator[Operation]:
        """Operations issued ``before`` the recent ones that devices have only now come to, and their
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
            recent=tuple(self._issued(operation) for operation in recent),
            at_communication=bool(head.at_communication),
            silent_seconds=max(0.0, now - head.time),
            device_step=None if device_step < 0 else device_step,
            device_busy=None if busy < 0 else bool(busy),
            captured=self._memory.words[layout.CAPTURED],
        )

    def _issued(self, operation: Operation) -> IssuedOp:
        journal, phrase = self._journal, operation.phrase
        return IssuedOp(
            line=journal.lines[operation.line].key,
            number=operation.number,
            fingerprint=operation.fingerprint,
            digest=operation.digest,
            text=journal.phrases[phrase] if phrase >= 0 else f"unlisted {operation.fingerprint:016x}",
            sends=operation.sends,
            receives=operation.receives,
        )

    def _declared(self) -> Declarations:
        self._journal.extend(self._memory.appended(self._journal.length))
        return self._journal
