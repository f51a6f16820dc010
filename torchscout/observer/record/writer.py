"""The trainer's end of its progress record, which ``reader`` reads (paper, section 7).

An operation that may block is published to shared memory before it is entered, so the record stays readable
and correct while the trainer is blocked, stopped or dead. Neither end waits for the other; see ``layout``,
[Note: never torn].
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import WeakSet

from torchscout.decision.progress import CommGroup, Phase
from torchscout.observer.record import layout
from torchscout.observer.record.directory import create, news_of, operations_of
from torchscout.observer.record.layout import Memory, line_text, pack_operation, phrase_text

__all__ = ["NOWHERE", "ProgressWriter", "digest_after"]

NOWHERE = -1
"""The index of a line without room in the record."""

_MAX_PHRASES = 2048
_BITS = 0xFFFF_FFFF_FFFF_FFFF
_FIRST_DIGEST = 0x243F_6A88_85A3_08D3
_OUTSIDE_STEPS = (Phase.CHECKPOINT_READ, Phase.CHECKPOINT_WRITE, Phase.EVALUATION)
"""Phases that do not belong to an ordinary step."""


def digest_after(digest: int, fingerprint: int) -> int:
    """Return the digest of a line after one more operation with this fingerprint; both have 64 bits.

    Equal sequences have equal digests on every rank. An odd factor, and a shift of the high bits into the low
    ones, make each step a bijection in either argument and the digest depend on the order.
    """
    mixed = (digest * 0x9E37_79B9_7F4A_7C15 + fingerprint) & _BITS
    return mixed ^ (mixed >> 32)


class ProgressWriter:
    """Publishes a trainer's progress. Thread-safe; no call waits for a reader or fails for lack of room.

    After ``close``, and in a forked child, calls write to memory that nobody reads, so late hooks are
    harmless.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        # Reentrant, because a signal handler that publishes may interrupt a publication.
        self._lock = threading.RLock()
        self._memory = Memory(memory)
        self._owns_file = True
        self._number = self._step = self._operation = self._issued = self._at_communication = 0
        self._phase = layout.CODES[Phase.START]
        self._began: float | None = None
        self._has_stepped = False
        self._lines: dict[str, int] = {}
        self._counts: list[int] = []
        self._digests: list[int] = []
        self._before: dict[int, int] = {}
        """Line -> its digest before the last operation."""
        self._phrases: dict[int, int] = {}
        self._fingerprints: list[int] = []
        self.device_unknown()
        self._publish()
        _writers.add(self)

    @classmethod
    def create(cls, directory: Path, rank: int) -> ProgressWriter:
        """Create a new record; see ``directory.create``."""
        return cls(*create(directory, rank))

    @property
    def step(self) -> int:
        return self._step

    @property
    def coordinate(self) -> tuple[int, int]:
        """The host's coordinate, as in ``Progress.coordinate``."""
        return self._step, self._operation

    def start_from(self, step: int) -> None:
        """Set the number of steps that were finished before this process began."""
        with self._lock:
            self._step = step
            self._publish()

    def advance(self, phase: Phase) -> None:
        """Publish the next coordinate of this step."""
        with self._lock:
            self._operation += 1
            self._phase = layout.CODES[phase]
            self._at_communication = 0
            self._publish()

    def next_step(self, step: int | None = None) -> None:
        """End the step, so that ``step`` are finished, by default one more. Its duration is noted, unless it
        was paused; that of the first one as 0, since it compiles and connects and says nothing of others."""
        with self._lock:
            now = monotonic()
            if not self._has_stepped:
                self._memory.note(layout.STEPS, 0.0)
            elif self._began is not None and now > self._began:
                self._memory.note(layout.STEPS, now - self._began)
            self._has_stepped = True
            self._began = now
            self._step = self._step + 1 if step is None else step
            self._phase = layout.CODES[Phase.IDLE]
            self._operation = self._at_communication = 0
            self._publish()

    def declare(self, line: CommGroup) -> int:
        """Return the index of a line, the same for equal keys; ``NOWHERE`` if there is no room for it."""
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
        """Return the number that stands for this text and 64-bit fingerprint in ``issue``.

        Without room the text is dropped, and the negative number returned contains the fingerprint.
        """
        fingerprint &= _BITS
        with self._lock:
            index = self._phrases.get(fingerprint)
            if index is not None:
                return index
            if len(self._phrases) == _MAX_PHRASES or not self._memory.append(phrase_text(text)):
                return NOWHERE - fingerprint
            self._fingerprints.append(fingerprint)
            return self._phrases.setdefault(fingerprint, len(self._phrases))

    def issue(
        self,
        line: int,
        phrase: int,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
    ) -> int:
        """Publish that the next operation on that line is about to be entered, and return its number.

        Splits of more than 64 members are not kept. On the line ``NOWHERE`` only the coordinate advances, and
        the number is 0.
        """
        with self._lock:
            self._operation += 1
            self._at_communication = 0
            if line == NOWHERE:
                self._publish()
                return 0
            number = self._counts[line] = self._counts[line] + 1
            fingerprint = self._fingerprints[phrase] if phrase >= 0 else -1 - phrase
            self._before[line] = self._digests[line]
            digest = self._digests[line] = digest_after(self._digests[line], fingerprint)
            order, known = self._issued + 1, max(phrase, -1)
            packed = pack_operation(order, line, number, known, fingerprint, digest, sends, receives)
            self._memory.put_operation(order, packed)
            self._issued, self._at_communication = order, 1
            self._publish()
            self._memory.counts[line] = number
            return number

    def take_back(self, line: int, number: int) -> None:
        """Forget an operation that was published and then not issued, if it was the last one."""
        with self._lock:
            order = self._issued
            last = self._memory.operation(order)
            if line == NOWHERE:
                return
            is_last = last is not None and (last.line, last.number) == (line, number)
            if not is_last or line not in self._before:  # another thread has published meanwhile
                self.misses_operations()
                return
            self._counts[line] = number - 1
            self._digests[line] = self._before.pop(line)
            self._issued, self._at_communication = order - 1, 0
            self._publish()
            self._memory.counts[line] = number - 1

    def misses_operations(self) -> None:
        """Note that operations may be missing in this record from now on."""
        with self._lock:
            self._drop()

    def pause(self) -> None:
        """Ignore silence until ``resume``."""
        with self._lock:
            self._memory.words[layout.PAUSED] = 1
            self._began = None

    def resume(self) -> None:
        """Let silence count again, from now on."""
        with self._lock:
            self._publish()
            self._memory.words[layout.PAUSED] = 0

    def device_step(self, step: int) -> None:
        """Publish that the device has finished ``step``; news ends silence but no communication."""
        with self._lock:
            if step != self._memory.words[layout.DEVICE_STEP]:
                self._memory.words[layout.DEVICE_STEP] = step
                self._publish()

    def device_entered(self, line: int, number: int) -> None:
        """Publish that the device has reached an operation; news ends silence but no communication."""
        with self._lock:
            if line != NOWHERE and number != self._memory.entered[line]:
                self._memory.entered[line] = number
                self._publish()

    def device_asked(self, busy: bool | None, now: float) -> None:
        """Note that the device's progress was read at ``now``; ``busy`` is whether it has work, if known."""
        self._memory.words[layout.DEVICE_BUSY] = layout.UNKNOWN if busy is None else int(busy)
        self._memory.words[layout.DEVICE_ASKED] = int(1000 * now)

    def device_unknown(self) -> None:
        """Mark the device's progress as unknown, unless the trainer has finished."""
        with self._lock:
            words = self._memory.words
            if words[layout.FINISHED]:
                return
            for word in (layout.DEVICE_STEP, layout.DEVICE_BUSY, layout.DEVICE_ASKED):
                words[word] = layout.UNKNOWN
            for line in range(len(self._lines)):
                self._memory.entered[line] = layout.UNKNOWN

    def captured(self) -> None:
        """Count an operation that was captured into a CUDA graph, whose replays are not seen."""
        self._memory.words[layout.CAPTURED] += 1

    def show_operations(self, operations: Mapping[str, Any] | None) -> None:
        """Write the output of the Flight Recorder beside the record, for the observer to include."""
        if operations is not None and self._owns_file:
            with suppress(OSError):  # optional evidence: a full file system must not matter
                operations_of(self.path).write_text(json.dumps({"step": self._step, **operations}))

    def time_phase(self, phase: Phase, seconds: float) -> None:
        """Note the duration of a phase, for comparison with peers."""
        with self._lock:
            self._memory.note(layout.CODES[phase], seconds)

    def leave_out(self, phase: Phase, seconds: float) -> None:
        """Do not count a checkpoint or an evaluation as part of the step: it must not raise the threshold."""
        with self._lock:
            if phase in _OUTSIDE_STEPS and self._began is not None:
                self._began += seconds

    def finished(self) -> None:
        """Publish that the trainer ends on purpose."""
        with self._lock:
            self._memory.words[layout.FINISHED] = 1

    def exiting(self) -> None:
        """Publish that the interpreter exits; the exit status will tell whether on purpose."""
        with self._lock:
            self._memory.words[layout.FINISHED] = self._memory.words[layout.FINISHED] or layout.EXITING

    def asked(self) -> None:
        """Publish that SIGTERM ends the process, unless it was ending already."""
        with self._lock:
            self._memory.words[layout.FINISHED] = self._memory.words[layout.FINISHED] or layout.ASKED

    def failing(self) -> None:
        """Publish that an exception ends the program; its exit may take a while."""
        with self._lock:
            self._memory.words[layout.FINISHED] = layout.FAILING

    def restarting(self) -> None:
        """Publish that this process leaves because of a decision: to restart the job, or to stop it."""
        with self._lock:
            self._memory.words[layout.FINISHED] = layout.RESTARTING

    def close(self) -> None:
        """Remove the file; open mappings stay readable."""
        with self._lock:
            if self._owns_file:
                for path in (self.path, operations_of(self.path), news_of(self.path)):
                    path.unlink(missing_ok=True)
            self._detach()

    def forget_after_fork(self) -> None:
        """Detach in a forked child: the record is the parent's, and a thread of the parent may hold the
        lock."""
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
