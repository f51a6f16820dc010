"""What checks have found so far on this rank, for the status of replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torchscout.decision.repeatability import UNDECIDED, unmet
from torchscout.decision.types import EvidenceRecord, Surface

__all__ = ["CheckHistory"]


class CheckHistory:
    """The last results of all targets, what was not checked, and what prevented certification."""

    def __init__(self) -> None:
        self.latest: dict[str, dict[str, Any]] = {}
        """The step at which each target was last compared, and whether peers agreed."""
        self.not_checked: dict[Surface, str] = {}
        """Why surfaces could not be compared when they were last due."""
        self.held_up: dict[Surface, str] = {}
        """Why the last check certified nothing although no rank was at fault."""
        self._was_held_up = False
        """Whether the last check was held up on some rank."""
        self._verdicts: Counter[tuple[str, str]] = Counter()
        """How many comparisons there were, by manifestation and status."""

    def count(self, records: Iterable[EvidenceRecord]) -> None:
        """Count the verdicts of these records."""
        self._verdicts.update((each.manifestation.value, each.status) for each in records)

    def metrics(self) -> dict[str, Any]:
        """Return the counts, and the step of the target that was compared longest ago; see
        ``Session.metrics``."""
        steps = [each["step"] for each in dict(self.latest).values()]
        return {
            "verdicts": [[*key, count] for key, count in dict(self._verdicts).items()],
            "oldest": min(steps, default=None),
        }

    def hold_up(self, unmet: Mapping[Surface, str | None]) -> bool:
        """Note what prevents certification, and return whether anything does."""
        found = {surface: why for surface, why in unmet.items() if why is not None}
        self.held_up |= found
        return bool(found)

    def is_new(self, agreed: int, own: int) -> bool:
        """Return whether this rank logs what holds up the check: nothing did at the last check, and of all
        ranks that have something, this one is the first. Their highest vote is ``agreed``; 0 if none has."""
        was_held_up, self._was_held_up = self._was_held_up, agreed > 0
        return agreed == own and not was_held_up

    def add(self, records: Sequence[EvidenceRecord], require: Collection[str]) -> None:
        """Add the records of one check; see ``ReplayConfig.require``."""
        self.held_up = unmet(records, require) | {
            each.surface: each.reason
            for each in records
            if each.reason is not None and each.reason.startswith(UNDECIDED)
        }
        for record in records:
            name = record.layer or record.surface
            if record.verdict is None:
                self.not_checked[record.surface] = str(record.reason)
                continue
            self.not_checked.pop(record.surface, None)
            known = self.latest.get(name, {})
            clean = record.verdict.agrees and (known.get("step") != record.step or known["clean"])
            self.latest[name] = {"step": record.step, "clean": clean}
