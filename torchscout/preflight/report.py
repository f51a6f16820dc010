"""What a preflight concludes from its incidents and its coverage, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from torchscout.decision.types import Incident, Scope
from torchscout.utils.text import listed, sentences

__all__ = ["SCHEMA", "Conclusion", "Coverage", "Device", "Report", "conclude"]

SCHEMA = 1
"""Version of the JSON document."""
LEAST_CYCLES = 2
"""How often every layer must have been replayed: the first time is not timed."""


class Conclusion(str, Enum):
    HEALTHY = "healthy"
    """Everything was covered, and nothing was found."""
    FAULTY = "faulty"
    """At least one rank, machine or link is named."""
    UNDECIDED = "undecided"
    """Ranks differ without a majority, or too little was covered."""

    @property
    def exit_code(self) -> int:
        return {Conclusion.HEALTHY: 0, Conclusion.FAULTY: 1, Conclusion.UNDECIDED: 2}[self]


@dataclass(frozen=True, slots=True)
class Device:
    """Where one rank runs."""

    rank: int
    host: str
    name: str
    """The model of the device, or ``cpu``."""
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was repeated and compared."""

    layers: Mapping[str, int] = field(default_factory=dict)
    """How often each layer was replayed and compared."""
    recipes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Targets, visited targets and whole cycles of each recipe."""
    links: Mapping[str, int] = field(default_factory=dict)
    """The number of process groups of each kind over which data was sent."""
    not_checked: Mapping[str, str] = field(default_factory=dict)
    """What could not be compared, with the reason."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a preflight, the same on every rank."""

    conclusion: Conclusion
    reasons: tuple[str, ...]
    """Why nothing could be decided, in sentences."""
    incidents: tuple[Incident, ...]
    devices: tuple[Device, ...]
    coverage: Coverage
    seconds: float
    checks: int
    run_dir: str | None

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that incidents name."""
        return tuple(sorted({rank for each in self.incidents if self._names(each) for rank in each.ranks}))

    def _names(self, incident: Incident) -> bool:
        return names_somebody(incident, len(self.devices))

    def to_json(self) -> dict[str, Any]:
        hosts = {each.rank: each.host for each in self.devices}
        return {
            "schema": SCHEMA,
            "kind": "preflight",
            "conclusion": self.conclusion.value,
            "exit_code": self.conclusion.exit_code,
            "reasons": list(self.reasons),
            "ranks": list(self.named),
            "hosts": list(dict.fromkeys(hosts[rank] for rank in self.named)),
            "incidents": [
                {
                    "manifestation": each.manifestation.value,
                    "scope": each.scope.value,
                    "named": self._names(each),
                    "ranks": list(each.ranks),
                    "hosts": list(each.hosts),
                    "surface": each.records[0].surface,
                    "sentence": each.sentence,
                }
                for each in self.incidents
            ],
            "devices": [asdict(each) for each in self.devices],
            "coverage": asdict(self.coverage),
            "seconds": round(self.seconds, 1),
            "checks": self.checks,
            "run_dir": self.run_dir,
        }


def names_somebody(incident: Incident, size: int) -> bool:
    """Whether an incident names less than the whole job, and not two peers of which one is at fault."""
    return incident.scope is not Scope.PEER_GROUP and 0 < len(incident.ranks) < size


def conclude(
    incidents: Sequence[Incident], size: int, coverage: Coverage, problems: Sequence[str]
) -> tuple[Conclusion, tuple[str, ...]]:
    """Return the conclusion, and why nothing could be decided otherwise.

    ``problems`` are those of the preflight itself. A hang or a crash ends it, so that its coverage does not
    matter.
    """
    if any(names_somebody(each, size) for each in incidents):
        return Conclusion.FAULTY, ()
    reasons = [*problems]
    if incidents:
        reasons.append("the findings do not show which rank, machine or link is at fault")
    has_stopped = any(each.manifestation.stops_job for each in incidents)
    missing = [name for name, cycles in coverage.layers.items() if cycles < LEAST_CYCLES]
    if missing and not has_stopped and not problems:
        reasons.append(
            f"the time was too short to repeat {listed(missing)} {LEAST_CYCLES} times; give more --seconds"
        )
    if reasons:
        return Conclusion.UNDECIDED, tuple(sentences(each) for each in reasons)
    return Conclusion.HEALTHY, ()
