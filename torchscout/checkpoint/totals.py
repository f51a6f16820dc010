"""How many snapshots or copies were made, how long that took, and how large they were."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the session began. Replaced as a whole, so that any thread may read them."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def plus(self, *, seconds: float = 0.0, count: int = 0, size: int = 0) -> Totals:
        return Totals(self.count + count, self.seconds + seconds, self.bytes + size)

    def to_json(self) -> dict[str, float]:
        return asdict(self)
