"""How a session came to its end, in one word for the run directory and one line for the log."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence

from torchscout.decision.record import Incident
from torchscout.observer.record.directory import How
from torchscout.utils.text import listed

__all__ = ["closing_line", "how_ended"]

_ASKED = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}


def how_ended(error: BaseException | None) -> How:
    """From the exception that ends the program, if any."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        if error.code in _ASKED:
            return "interrupted"
        return "failed" if error.code else "finished"
    # A generator that is not run to its end is closed by this one.
    return "finished" if error is None or isinstance(error, GeneratorExit) else "failed"


def closing_line(
    how: str, step: int, incidents: Sequence[Incident], certified: int | None, error: BaseException | None
) -> str:
    """What a rank says last."""
    counts = Counter(each.manifestation.value for each in incidents)
    told = f"incidents: {listed([f'{count} {kind}' for kind, count in sorted(counts.items())])}"
    by = "" if how != "failed" or error is None else f" by {type(error).__name__}: {error}"
    checked = "" if certified is None else f"; certified up to step {certified}"
    return f"{how} after step {step}{by}; {told if counts else 'no incidents'}{checked}"
