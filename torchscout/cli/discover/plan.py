"""What a discovery is to execute, from what the user said; mistakes show here, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchscout.experts.coverage import Rows, uniform

if TYPE_CHECKING:
    from torchscout.experts.templates import Routings

__all__ = ["KERNELS", "REGIMES", "Plan", "layers_in", "rows_in"]

KERNELS = ("triton", "torch")
REGIMES = ("pressure", "waves")
_MOST_ROWS, _MOST_LAYERS = 1_000_000, 10_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The experts of a model, and the shapes they may be given."""

    rows: tuple[int, ...]
    """Row counts to admit, the same for every expert of the kernel."""
    domain: str
    """The same, as the user said it."""
    hidden: int
    intermediate: int
    experts: int
    layers: tuple[str, ...]
    positions: int
    kernel: str
    module: str | None
    """Where to get the expert module whose kernels run instead, ``package.module:function``."""
    regime: str
    device: str
    programs: int | None
    """Of the kernel; None for one on each multiprocessor."""
    routings: Routings | None
    """Rows that a kernel's experts share in any way; None if only uniform shapes are admitted."""

    @property
    def shapes(self) -> list[Rows]:
        return [uniform(rows, self.experts) for rows in self.rows]

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """Up and down; one will do if they are alike."""
        return tuple(dict.fromkeys([(self.hidden, self.intermediate), (self.intermediate, self.hidden)]))


def rows_in(told: str) -> tuple[int, ...]:
    """``1:2048``, both included, or single numbers, or several of either with commas between them."""
    found: set[int] = set()
    for part in told.split(","):
        first, colon, last = part.strip().partition(":")
        if not first.isdigit() or (colon and not last.isdigit()):
            raise ValueError(f"row counts such as 1:2048 or 0,1,128, got {part!r}")
        begin, end = int(first), int(last or first)
        if end < begin:
            raise ValueError(f"a range goes from fewer rows to more, got {part!r}")
        if end - begin >= _MOST_ROWS:
            raise ValueError(f"at most {_MOST_ROWS} row counts are executed, got {part!r}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def layers_in(told: str) -> tuple[str, ...]:
    """A number of layers, or their names with commas between them."""
    if told.isdigit():
        if not 0 < int(told) <= _MOST_LAYERS:
            raise ValueError(f"1 to {_MOST_LAYERS} layers, got {told}")
        return tuple(f"layer.{number}" for number in range(int(told)))
    names = tuple(name.strip() for name in told.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"a number of layers, or different names, got {told!r}")
    return names
