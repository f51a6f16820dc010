"""The record that a trainer publishes and its observer reads (paper, section 7).

What may block is published before it is entered, into shared memory; so the record stays readable
and true while the trainer is blocked, stopped or dead. Neither end waits for the other, see
``layout``, [Note: never torn]. What a coordinate means for a hang, and when silence is too long, is
decided elsewhere.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import WeakSet

from torchscout.decision.progress import Issued, Line, Phase, Process, Progress
from torchscout.errors import TornRecordError
from torchscout.evidence.observer import layout, record_file
from torchscout.evidence.observer.journal import Journal, line_text, phrase_text
from torchscout.evidence.observer.layout import Head, Memory, Operation, pack_operation
from torchscout.evidence.observer.record_file import reclaim

__all__ = ["NOWHERE", "ProgressReader", "ProgressWriter", "digest_after", "reclaim"]

NOWHERE = -1
"""The index of a line for which there was no room."""

_PHRASES = 2048
_BITS = 0xFFFF_FFFF_FFFF_FFFF
_FIRST_DIGEST = 0x243F_6A88_85A3_08D3
_ATTEMPTS = 100
_DEVICE_SECONDS = 2.0
"""After this long, what a device was last known to have come to may be out of date."""
_MARGIN = 16
"""Operations that a trainer may issue while its record is read."""
_ASIDE = (Phase.CHECKPOINT_READ, Phase.CHECKPOINT_WRITE, Phase.EVALUATION)
"""Phases that are no part of an ordinary step."""


def digest_after(digest: int, fingerprint: int) -> int:
    """The digest of a line that goes on with ``fingerprint``; both have 64 bits.

    Equal sequences have equal digests on every rank. An odd factor, and a shift of the high bits
    into the low ones, make each step a bijection of either argument, and order matter.
    """
    mixed = (digest * 0x9E37_79B9_7F4A_7C15 + fingerprint) & _BITS
    return mixed ^ (mixed >> 32)


class ProgressWriter:
    """The trainer's end. Any thread may call; no call waits for a reader or fails for lack of room.

    After ``close``, and in a forked child, calls go to memory that nobody reads: late hooks do no harm.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        # Reentrant at the same price: a signal handler that publishes may interrupt a publication.
        self._lock = threading.RLock()
        self._memory = Memory(memory)
        self._owns_file = True
        self._number = self._step = self._operation = self._issued = self._at_communication = 0
        self._phase = layout.CODES[Phase.START]
        self._began: float | None = None
        self._lines: dict[str, int] = {}
        self._counts: list[int] = []
        self._digests: list[int] = []
        self._phrases: dict[int, int] = {}
        self._fingerprints: list[int] = []
        self.device_unknown()
        self._publish()
        _writers.add(self)

    @classmethod
    def create(cls, directory: Path, rank: int) -> ProgressWriter:
        """A new record, in a directory that only its owner can use; it is made if need be."""
        return cls(*record_file.create(directory, rank))

    @property
    def step(self) -> int:
        return self._step

    @property
    def coordinate(self) -> tuple[int, int]:
        """How far the host is, as ``Progress.coordinate`` has it."""
        return self._step, self._operation

    def go_on_from(self, step: int) -> None:
        """So many steps were done before this process began."""
        with self._lock:
            self._step = step
            self._publish()

    def advance(self, phase: Phase) -> None:
        """One more coordinate in this step."""
        with self._lock:
            self._operation += 1
            self._phase = layout.CODES[phase]
            self._at_communication = 0
            self._publish()

    def next_step(self) -> None:
        """The step is over. Its duration is noted, but for the first one and a paused one."""
        with self._lock:
            now = monotonic()
            if self._began is not None and now > self._began:
                self._memory.note(layout.STEPS, now - self._began)
            self._began = now
            self._step += 1
            self._phase = layout.CODES[Phase.IDLE]
            self._operation = self._at_communication = 0
            self._publish()

    def declare(self, line: Line) -> int:
        """The index of a line, the same for the same key; ``NOWHERE`` if there is no room for one more."""
        with self._lock:
            index = self._lines.get(line.key)
            if index is not None:
                return index
            if len(self._lines) == layout.LINES or not self._memory.append(line_text(line)):
                return self._drop()
            self._counts.append(0)
            self._digests.append(_FIRST_DIGEST)
            self._memory.entered[len(self._lines)] = layout.UNKNOWN
            return self._lines.setdefault(line.key, len(self._lines))

    def phrase(self, text: str, fingerprint: int) -> int:
        """What stands for this fingerprint, 64 bits of it, in ``issue``.

        Without room the text is dropped but never the fingerprint: it is in the negative number
        returned.
        """
        fingerprint &= _BITS
        with self._lock:
            index = self._phrases.get(fingerprint)
            if index is not None:
                return index
            if len(self._phrases) == _PHRASES or not self._memory.append(phrase_text(text)):
                return self._drop() - fingerprint
            self._fingerprints.append(fingerprint)
            return self._phrases.setdefault(fingerprint, len(self._phrases))

    def issue(
        self,
        line: int,
        phrase: int,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ) -> int:
        """About to enter the next operation on that line: one more coordinate. Returns its number.

        Splits of more than 64 members are not kept. On a line that is ``NOWHERE`` only the
        coordinate advances, and the number is 0.
        """
        with self._lock:
            self._operation += 1
            self._at_communication = 0
            if line == NOWHERE:
                self._publish()
                return 0
            number = self._counts[line] = self._counts[line] + 1
            fingerprint = self._fingerprints[phrase] if phrase >= 0 else -1 - phrase
            digest = self._digests[line] = digest_after(self._digests[line], fingerprint)
            order, known = self._issued + 1, max(phrase, -1)
            packed = pack_operation(order, line, number, known, fingerprint, digest, sends, receives)
            self._memory.put_operation(order, packed)
            self._issued, self._at_communication = order, 1
            self._publish()
            self._memory.counts[line] = number
            return number

    def pause(self) -> None:
        """Silence means nothing until ``resume``."""
        with self._lock:
            self._memory.words[layout.PAUSED] = 1
            self._began = None

    def resume(self) -> None:
        """Silence counts again, beginning now."""
        with self._lock:
            self._publish()
            self._memory.words[layout.PAUSED] = 0

    def device_step(self, step: int) -> None:
        """The accelerator has finished ``step``: if that is news, it ends silence but no communication."""
        with self._lock:
            if step != self._memory.words[layout.DEVICE_STEP]:
                self._memory.words[layout.DEVICE_STEP] = step
                self._publish()

    def device_entered(self, line: int, number: int) -> None:
        """The accelerator has come to an operation: if that is news, it ends silence but no communication."""
        with self._lock:
            if line != NOWHERE and number != self._memory.entered[line]:
                self._memory.entered[line] = number
                self._publish()

    def device_asked(self, busy: bool | None, now: float) -> None:
        """The accelerator was asked how far it is, and whether it has work left if that matters."""
        self._memory.words[layout.DEVICE_BUSY] = layout.UNKNOWN if busy is None else int(busy)
        self._memory.words[layout.DEVICE_ASKED] = int(1000 * now)

    def device_unknown(self) -> None:
        """Nothing is known of an accelerator, or no longer. Of a trainer that left, what was known last
        stays."""
        with self._lock:
            words = self._memory.words
            if words[layout.FINISHED]:
                return
            words[layout.DEVICE_STEP] = words[layout.DEVICE_BUSY] = words[layout.DEVICE_ASKED] = (
                layout.UNKNOWN
            )
            for line in range(len(self._lines)):
                self._memory.entered[line] = layout.UNKNOWN

    def captured(self) -> None:
        """An operation went into a CUDA graph, whose replays nobody sees."""
        self._memory.words[layout.CAPTURED] += 1

    def show_operations(self, operations: Mapping[str, Any] | None) -> None:
        """Put what the Flight Recorder says beside the record, for its observer to show."""
        if operations is not None and self._owns_file:
            with suppress(OSError):  # it only goes along with an incident: a full file system must not matter
                beside = record_file.operations_of(self.path)
                beside.write_text(json.dumps({"step": self._step, **operations}))

    def time_phase(self, phase: Phase, seconds: float) -> None:
        """A phase took so long."""
        with self._lock:
            self._memory.note(layout.CODES[phase], seconds)
            if phase in _ASIDE and self._began is not None:
                self._began += seconds  # or a checkpoint would make its step look slow, and us patient

    def finished(self) -> None:
        """The trainer leaves on purpose."""
        with self._lock:
            self._memory.words[layout.FINISHED] = 1

    def close(self) -> None:
        """Remove the file; whoever has it open can read on."""
        with self._lock:
            if self._owns_file:
                self.path.unlink(missing_ok=True)
                record_file.operations_of(self.path).unlink(missing_ok=True)
            self._detach()

    def forget_after_fork(self) -> None:
        """The record is the parent's. Its lock may be held by a thread that is not here to release it."""
        self._lock = threading.RLock()
        self._detach()

    def _detach(self) -> None:
        self._owns_file = False
        self._memory = Memory(mmap.mmap(-1, layout.SIZE))

    def _publish(self) -> None:
        self._number += 1
        self._memory.put_head(
            self._number,
            self._step,
            self._operation,
            self._phase,
            self._at_communication,
            self._issued,
            monotonic(),
        )

    def _drop(self) -> int:
        self._memory.words[layout.DROPPED] += 1
        return NOWHERE


_writers: WeakSet[ProgressWriter] = WeakSet()


def _forget_after_fork() -> None:
    for writer in _writers:
        writer.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


class ProgressReader:
    """The observer's end. It reads on when the trainer is gone, or the file."""

    def __init__(self, path: Path) -> None:
        """A ``ValueError`` names a file that is no record of this user."""
        self.path = path
        memory, self.rank, self._trainer = record_file.open_record(path)
        self._memory = Memory(memory)
        self._journal = Journal()

    @property
    def pid(self) -> int:
        return self._trainer.pid

    @property
    def paused(self) -> bool:
        return bool(self._memory.words[layout.PAUSED])

    @property
    def has_finished(self) -> bool:
        return bool(self._memory.words[layout.FINISHED])

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
            shown: dict[str, Any] = json.loads(record_file.operations_of(self.path).read_text())
        except (OSError, ValueError):  # none was written, or is being written right now
            return None
        return shown if shown.get("step") == step else None

    def lines(self) -> dict[str, Line]:
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
        self, before: int, entered: Mapping[int, int], declared: Journal
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

    def _issued(self, operation: Operation) -> Issued:
        journal, phrase = self._journal, operation.phrase
        return Issued(
            line=journal.lines[operation.line].key,
            number=operation.number,
            fingerprint=operation.fingerprint,
            digest=operation.digest,
            text=journal.phrases[phrase] if phrase >= 0 else f"unlisted {operation.fingerprint:016x}",
            sends=operation.sends,
            receives=operation.receives,
        )

    def _declared(self) -> Journal:
        self._journal.extend(self._memory.appended(self._journal.length))
        return self._journal
