"""What one sees of the demo while it runs: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchscout.cli.demo.stage import Stage

__all__ = ["Lines", "Picture", "View", "view_for"]

_TOLD = 14
"""Sentences that are kept for below the table."""
_FRAME = 5
"""Lines of the table besides its rows: title, heads and borders."""
_FEWEST = 4
"""Rows of the table, however low the terminal is."""
_SENTENCES = 6
"""Lines below the table that are kept free for what is said."""
_INDENT = " " * 11
"""As wide as the word that a line begins with."""


class View(Protocol):
    """A narrator. Ranks are told of by number."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None: ...

    def stepped(self, step: int, loss: float) -> None: ...

    def mark(self, ranks: Sequence[int], what: str) -> None:
        """Something is known about these."""
        ...

    def clear(self) -> None:
        """New processes: nothing is known about them."""
        ...


def view_for(stage: Stage) -> View:
    """On standard error, so that standard output is free for a document."""
    console = Console(stderr=True)
    return Picture(stage, console) if console.is_terminal else Lines()


class Lines:
    """One line for each thing that happens."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def stepped(self, step: int, loss: float) -> None:
        self.say(f"step {step:2}   loss {loss:.4f}")

    def mark(self, ranks: Sequence[int], what: str) -> None:
        """What is known was said."""

    def clear(self) -> None:
        """So was this."""


class Picture:
    """The ranks as a table, and below it what was said last: as much of both as the terminal is high."""

    def __init__(self, stage: Stage, console: Console) -> None:
        self._stage, self._console = stage, console
        self._step, self._loss = 0, ""
        self._marks: dict[int, str] = {}
        self._earlier: dict[int, str] = {}
        """What was known of ranks whose processes have been replaced."""
        self._said: deque[str] = deque(maxlen=_TOLD)
        self._live = Live(self._drawn(), console=console, refresh_per_second=8)

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._said.append(line)
        self._draw()

    def stepped(self, step: int, loss: float) -> None:
        self._step, self._loss = step, f"{loss:.4f}"
        self._draw()

    def mark(self, ranks: Sequence[int], what: str) -> None:
        self._marks.update(dict.fromkeys(ranks, what))
        self._draw()

    def clear(self) -> None:
        self._earlier |= self._marks
        self._marks.clear()
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._drawn())

    def _drawn(self) -> Group:
        table = Table(title=f"step {self._step}   loss {self._loss}", title_justify="left")
        for heading in ("rank", "place", "what is known"):
            table.add_column(heading)
        shown = self._shown(max(_FEWEST, self._console.height - _FRAME - _SENTENCES))
        for rank in shown:
            table.add_row(str(rank), self._stage.place_of(rank), self._known(rank))
        if left := self._stage.ranks - len(shown):
            table.add_row("...", f"{left} more", Text("healthy", style="green"))
        height = _FRAME + len(shown) + bool(left)
        return Group(table, *self._sentences(max(1, self._console.height - height - 1)))

    def _shown(self, most: int) -> list[int]:
        """The ranks of the table, in order; where not all fit, those of which something is known first."""
        ranks = range(self._stage.ranks)
        if len(ranks) <= most:
            return [*ranks]
        order = sorted(ranks, key=lambda rank: (rank not in self._marks, rank not in self._earlier, rank))
        return sorted(order[: most - 1])

    def _known(self, rank: int) -> Text:
        if rank in self._marks:
            return Text(self._marks[rank], style="bold red")
        if rank in self._earlier:
            return Text(f"was {self._earlier[rank]}", style="yellow")
        return Text("healthy", style="green")

    def _sentences(self, most: int) -> list[Text]:
        """The last of what was said that has room in so many lines; wrapped between words."""
        lines = [
            line
            for said in self._said
            for line in textwrap.wrap(said, self._console.width, subsequent_indent=_INDENT) or [""]
        ]
        return [Text(line) for line in lines[-most:]]
