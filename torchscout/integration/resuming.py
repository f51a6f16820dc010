"""From what should be loaded to what is: loaded, looked at, and if need be exchanged (paper, section 8).

Until all of this has come to an end nothing is written down, so that a job that is killed meanwhile finds
everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from torchscout.checkpoint.gate import CheckpointGate, transition
from torchscout.checkpoint.gate_state import Lost
from torchscout.checkpoint.generation import Generation, TrustLevel
from torchscout.checkpoint.resume.fetch import Fetched
from torchscout.checkpoint.selection import Selection, SweepResult, confirm
from torchscout.checkpoint.storage.shards import Restored
from torchscout.errors import CheckpointError
from torchscout.integration.resumption import Sweeping, Swept

__all__ = ["Loaded", "UnfitError", "load_what_is_fit"]

Load = Callable[[Sequence[Generation]], Fetched[Restored]]
"""The first of these that all ranks can have, put into the model."""


class UnfitError(CheckpointError):
    """What was loaded must not be trained on, and there is nothing else."""

    def __init__(self, reason: str, lost: Sequence[Generation]) -> None:
        super().__init__(
            f"{reason} To begin again, start the job once more and call session.resume(start_over=True)."
        )
        self.lost = lost
        """Those that new processes shall not try again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the model holds, and why."""

    decision: Selection
    fetched: Fetched[Restored]
    swept: Swept | None
    """Of everything; None if there was no need for that."""
    lost: tuple[Generation, ...]
    """Passed over: damaged, or unfit."""


def load_what_is_fit(
    gate: CheckpointGate,
    decision: Selection,
    wanted: Sequence[Generation],
    load: Load,
    sweep: Sweeping | None,
) -> Loaded:
    """Every rank comes to the same; ``UnfitError`` on all of them if nothing of it may be trained on."""
    lost: list[Generation] = []
    told: Swept | None = None
    while True:
        fetched = load(wanted)
        lost += [passed for passed, _ in fetched.plan.passed]
        swept = None if sweep is None else sweep(fetched.step, decision.is_swept)
        if decision.is_swept:
            told = swept
        if swept is not None and swept.is_state:
            # A copy went wrong after it was certified: the one before it need not have.
            lost.append(fetched.generation)
            reason = f"Replicas hold different numbers in {fetched.generation}."
            older = [each for each in wanted if each < fetched.generation]
        elif not decision.tentative or fetched.generation in gate.trusted:
            return Loaded(decision, fetched, told, tuple(lost))
        else:
            decision = _confirmed(gate, lost, told)
            if decision.role is TrustLevel.LATEST:
                return Loaded(decision, fetched, told, tuple(lost))
            reason = decision.reason
            older = [each for each in reversed(gate.trusted) if each < fetched.generation]
        if not older:
            raise UnfitError(reason, [*gate.captured, *lost])
        wanted = older


def _confirmed(gate: CheckpointGate, lost: Sequence[Generation], swept: Swept | None) -> Selection:
    found = reduce(lambda known, gone: transition(known, Lost(gone))[0], lost, gate)
    return confirm(found, SweepResult.COULD_NOT_RUN if swept is None else swept.sweep)
