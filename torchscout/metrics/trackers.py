"""One line for each incident in TensorBoard or Weights & Biases, beside the curves of training.

Both are recorders (``run.writer.Recorder``); pass ``record`` as ``on_incident``. They write to
objects that the program has opened, and need no package of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from torchscout.decision.types import Incident, Recordable, headline

__all__ = ["TensorBoardRecorder", "WandbRecorder"]


class _SummaryWriter(Protocol):
    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> Any: ...

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...

    def flush(self) -> Any: ...


class _Run(Protocol):
    """What of ``wandb.Run`` is used."""

    @property
    def summary(self) -> Any: ...

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> Any: ...


class _Counts:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, item: Recordable) -> tuple[str, int] | None:
        """Return the name and the new count of an incident; None for anything else."""
        if not isinstance(item, Incident):
            return None
        kind = item.manifestation.value
        self._counts[kind] += 1
        return f"torchscout/incidents/{kind}", self._counts[kind]


class TensorBoardRecorder:
    """Writes to a ``torch.utils.tensorboard.SummaryWriter``, which the program closes itself."""

    def __init__(self, writer: _SummaryWriter) -> None:
        self._writer, self._counts = writer, _Counts()

    def record(self, item: Recordable) -> None:
        """Write the sentence of an incident as text, and how many there are of its kind as a scalar."""
        if (counted := self._counts.add(item)) is not None and isinstance(item, Incident):
            # TensorBoard renders Markdown; indented text is shown as it is.
            self._writer.add_text("torchscout/incident", f"    {headline(item)}", item.step)
            self._writer.add_scalar(*counted, item.step)
            self._writer.flush()

    def close(self) -> None: ...


class WandbRecorder:
    """Writes to a ``wandb.Run``, which the program finishes itself."""

    def __init__(self, run: _Run) -> None:
        self._run, self._counts = run, _Counts()

    def record(self, item: Recordable) -> None:
        """Add the number of incidents to the row that the program logs next, and the last sentence to the
        summary. It starts no row, so that the program's steps stay as they are."""
        if (counted := self._counts.add(item)) is not None and isinstance(item, Incident):
            name, count = counted
            self._run.log({name: count}, commit=False)
            self._run.summary.update({name: count, "torchscout/last_incident": headline(item)})

    def close(self) -> None: ...
