"""The trainer's end of its progress record, which ``reader`` reads (paper, section 7).

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
"""The index of a line for which there was no room."""

_PHRASES = 2048
_BITS = 0xFFFF_FFFF_FFFF_FFFF
_FIRST_DIGEST = 0x243F_6A88_85A3_08D3
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
        return cls(*create(directory, rank))

    @property
    def step(self) -> int:
        return self._step

    @property
    def coordinate(self) -> tuple[int, int]:
        """How far the host is, as ``Progress.coordinate`` has it."""
        return self._step, self._operation

    def start_from(self, step: int) -> None:
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

    def next_step(self, step: int | None = None) -> None:
        """So many steps are over, by default one more. The duration of the last one is noted, unless it is
        the first one or a paused one."""
        with self._lock:
            now = monotonic()
            if self._began is not None and now > self._began:
                self._memory.note(layout.STEPS, now - self._began)
            self._began = now
            self._step = self._step + 1 if step is None else step
            self._phase = layout.CODES[Phase.IDLE]
            self._operation = self._at_communication = 0
            self._publish()

    def declare(self, line: CommGroup) -> int:
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
                beside = operations_of(self.path)
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

    def exiting(self) -> None:
        """The interpreter ends. Whether on purpose, the status says with which the process exits."""
        with self._lock:
            self._memory.words[layout.FINISHED] = self._memory.words[layout.FINISHED] or layout.EXITING

    def close(self) -> None:
        """Remove the file; whoever has it open can read on."""
        with self._lock:
            if self._owns_file:
                self.path.unlink(missing_ok=True)
                operations_of(self.path).unlink(missing_ok=True)
                news_of(self.path).unlink(missing_ok=True)
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
