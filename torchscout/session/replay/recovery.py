"""Replay that comes back after a failure: on all ranks at the same step, or not at all (paper, section 9).

A check may fail because a rank is late, a connection breaks or memory runs out. Then SCOUT's groups are
closed on this rank, the others notice, and all ranks connect again some steps later. Until then nothing is
checked and nothing is certified; what was certified before stays so. ``session.reconnection`` explains how
the ranks agree on the step.

Attempts are bounded, and each waits for twice as many steps as the one before. What fails every time (a bug,
an unreachable machine) must not cost training a timeout again and again. When checks stay off, an incident
says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.log import log
from torchscout.run.folder import REPLAY_FILE
from torchscout.session.reconnection import Proposal, Reconnection
from torchscout.session.replay.driver import ReplayDriver, ReplayParts
from torchscout.utils.private_files import make_folders, replace_text
from torchscout.utils.unlisted_groups import part_of

__all__ = ["ATTEMPTS", "RecoveringReplay", "steps_until"]

ATTEMPTS = 4
"""How often ranks try to reconnect before checks stay off, counted anew after ``_LASTING`` checks."""
SURFACE = "replay"
"""The surface of the incident when checks stay off."""
_LASTING = 20
_LEAST_STEPS = 4
"""Hosts may be ahead of their devices, and of each other, by some steps."""
_PATIENCE = 4
"""For how many intervals a rank waits for the others to leave. They notice at their next check."""


def steps_until(attempt: int, interval: int) -> int:
    """Return the number of steps before an attempt, where there is a check every ``interval`` steps."""
    steps: int = max(_LEAST_STEPS, interval) * 2 ** (attempt - 1)
    return steps


@dataclass(slots=True)
class _Outage:
    """The time without checks, as this rank knows it."""

    since: int
    """The step at which this rank noticed."""
    reason: str
    reconnection: Reconnection | None = None
    """None once this rank has given up."""
    next: int | None = None
    """The step of the next attempt; None if it is not known yet, or there is none."""
    attempt: int = 0
    has_accepted: bool = False

    def sentence(self) -> str:
        """Say what the state is."""
        begin = f"checks are off since step {self.since}"
        if self.reconnection is None:
            return f"{begin} and stay off: {self.reason}"
        if self.next is None:
            return f"{begin} until all ranks have noticed: {self.reason}"
        return f"{begin}, next attempt at step {self.next} ({self.attempt} of {ATTEMPTS}): {self.reason}"


class RecoveringReplay:
    """A replay driver that is reconnected after failures. Every rank makes the same calls."""

    def __init__(self, driver: ReplayDriver, parts: ReplayParts, run_dir: Path) -> None:
        """``parts`` are those of the driver."""
        self.driver, self._run_dir = driver, run_dir
        self._communicators, self._boundary = parts.communicators, parts.boundary
        self._recorder, self._on_incidents = parts.recorder, parts.on_incidents
        self._outage: _Outage | None = None
        self._attempts = 0
        """Attempts that led to the current connection, without a lasting success in between."""
        self._resumed_at = 0
        """The number of checks when replay came back."""

    def update_begins(self) -> None:
        """Called right before an update."""
        if self._is_watching:
            self._boundary.guarded(self.driver.update_begins)

    def step_finished(self, step: int) -> None:
        """Called right after the update: run the check that is due, or see whether to reconnect."""
        guarded = self._boundary.guarded
        if self._outage is None:
            guarded(lambda: self.driver.step_finished(step), on_failure=lambda: self._failed(step))
        elif (reconnection := self._outage.reconnection) is not None:
            outage = self._outage
            guarded(
                lambda: self._look(step, outage, reconnection),
                on_failure=lambda: self._give_up(self._boundary.failures[-1]),
            )

    @property
    def off(self) -> str | None:
        """Why there are no checks, since when, and whether they will come back; None if there are checks."""
        return None if self._outage is None else self._outage.sentence()

    def status(self) -> dict[str, Any]:
        """See ``Session.status``."""
        if (outage := self._outage) is None:
            return dict(self.driver.status())
        return {
            "off": outage.sentence(),
            "since": outage.since,
            "next_attempt": outage.next,
            "certified": self.driver.certified_step,
        }

    def metrics(self) -> dict[str, Any]:
        """See ``Session.metrics``."""
        return {"is_on": self._outage is None, **self.driver.metrics()}

    def close(self) -> None:
        if self._outage is None:
            self.driver.close()
        elif self._outage.reconnection is not None:
            self._outage.reconnection.close()
            self.driver.close()

    @property
    def _is_watching(self) -> bool:
        return self._outage is None or self._outage.reconnection is not None

    def _failed(self, step: int) -> None:
        """Leave the groups on this rank, and propose when to reconnect."""
        self._boundary.guarded(lambda: self.driver.disconnect(step))
        outage = self._outage = _Outage(step, self._boundary.failures[-1])
        self._boundary.guarded(
            lambda: self._leave(step, outage),
            on_failure=lambda: self._give_up(self._boundary.failures[-1]),
        )

    def _leave(self, step: int, outage: _Outage) -> None:
        connection = self._communicators.connections
        store = part_of(self._communicators.store, f"reconnection/{connection}")
        outage.reconnection = Reconnection(store, self._boundary.rank, self._communicators.size)
        has_lasted = self.driver.checks - self._resumed_at >= _LASTING
        attempt = 1 if has_lasted else self._attempts + 1
        when = step + steps_until(attempt, self.driver.interval) if attempt <= ATTEMPTS else None
        outage.reconnection.leave(f"step {step}: {outage.reason}", Proposal(when, attempt))
        self._note(outage.sentence(), is_on=False)

    def _look(self, step: int, outage: _Outage, reconnection: Reconnection) -> None:
        """See after a step how far the ranks are, and reconnect if they all do so at this step."""
        self.driver.watch(step)
        if (following := outage.next or self._first_attempt(step, outage, reconnection)) is None:
            return
        while following <= step:
            if reconnection.is_go(outage.attempt):
                reconnection.close()
                self._reconnect(step, outage)
                return
            if outage.attempt == ATTEMPTS:
                self._give_up(f"ranks were not ready at the same step; {outage.reason}")
                return
            outage.attempt, outage.has_accepted = outage.attempt + 1, False
            following += steps_until(outage.attempt, self.driver.interval)
        if outage.next != following:
            outage.next = following
            self._note(outage.sentence(), is_on=False)
        if not outage.has_accepted:
            reconnection.accept(outage.attempt)
            outage.has_accepted = True

    def _first_attempt(self, step: int, outage: _Outage, reconnection: Reconnection) -> int | None:
        """Return the step of the first attempt; None while it is not known, or if there will be none."""
        if (proposal := reconnection.proposal()) is not None:
            outage.attempt = proposal.attempt
            if proposal.step is None:
                self._give_up(f"{ATTEMPTS} attempts were not enough; {outage.reason}")
            return proposal.step
        if step >= outage.since + _PATIENCE * steps_until(1, self.driver.interval):
            self._give_up(f"some rank has not noticed by step {step}; {outage.reason}")
        return None

    def _reconnect(self, step: int, outage: _Outage) -> None:
        self._attempts, self._outage = outage.attempt, None
        guarded = self._boundary.guarded
        guarded(lambda: self.driver.reconnect(step), on_failure=lambda: self._failed(step))
        if self._outage is None:
            self._resumed_at = self.driver.checks
            self._note(f"checks go on after step {step}; they were off since step {outage.since}", is_on=True)

    def _give_up(self, reason: str) -> None:
        """Stay off. Other ranks cannot reconnect without this one, and give up too."""
        outage = self._outage
        assert outage is not None, "checks have failed"
        reconnection, outage.reconnection, outage.next = outage.reconnection, None, None
        first, reporter = None, 0
        if reconnection is not None:
            first = self._boundary.guarded(reconnection.first_reason)
            reporter = self._boundary.guarded(reconnection.reporter)
            reconnection.close()
        outage.reason = f"{reason} (first {first})" if first else reason
        incident = self._incident(outage)
        # Without an answer of the store it is not known who reports it: every rank writes it then, alike.
        writer = self._boundary.rank if reporter is None else reporter
        self._boundary.guarded(lambda: self._on_incidents(writer, [incident]))
        self._write(outage.sentence(), is_on=False)
        self._boundary.guarded(self.driver.close)

    def _incident(self, outage: _Outage) -> Incident:
        certified = self.driver.certified_step
        after = "Nothing" if certified is None else f"Nothing after step {certified}"
        sentence = (
            f"Wrong numbers and slow ranks are no longer found: {outage.sentence()}. {after} is certified. "
            "Training continues. Restart the job to check it again."
        )
        record = EvidenceRecord(
            step=outage.since,
            surface=SURFACE,
            manifestation=Manifestation.NOT_CHECKED,
            peers=tuple(range(self._communicators.size)),
            reason=outage.reason,
        )
        return Incident(
            manifestation=Manifestation.NOT_CHECKED,
            scope=Scope.JOB,
            step=outage.since,
            ranks=(),
            hosts=(),
            records=(record,),
            action=Action.CONTINUE,
            sentence=sentence,
        )

    def _note(self, sentence: str, *, is_on: bool) -> None:
        """Write the state to the log and the run directory."""
        if self._boundary.rank == 0:
            (log.info if is_on else log.warning)("%s", sentence)
        self._write(sentence, is_on=is_on)

    def _write(self, sentence: str, *, is_on: bool) -> None:
        outage = self._outage
        since, following = (None, None) if outage is None else (outage.since, outage.next)
        document = {"on": is_on, "since": since, "next_attempt": following, "sentence": sentence}

        def write() -> None:
            make_folders(self._run_dir)
            replace_text(self._run_dir / REPLAY_FILE, json.dumps(document))

        if self._boundary.rank == 0:
            self._boundary.guarded(write)
