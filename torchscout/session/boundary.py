"""The boundary between SCOUT and training: SCOUT's failures are recorded here and never propagate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchscout.log import log

__all__ = ["Boundary"]


class Boundary:
    """The step counter of a session, and the failures of SCOUT itself on this rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        """Training steps that have finished. Only the session changes it."""
        self.failures: list[str] = []

    def guarded(self, action: Callable[[], Any], *, on_failure: Callable[[], Any] | None = None) -> Any:
        """Return what ``action`` returns. If it raises, log that and return what ``on_failure`` returns."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  SCOUT failures never propagate into training
            self.failed(error)
        return None if on_failure is None else on_failure()

    def failed(self, error: Exception, *, is_shared: bool = False) -> None:
        """Record a failure of SCOUT. One that ``is_shared`` by all ranks is logged by rank 0 only."""
        failure = f"{type(error).__name__}: {error}"
        if failure in self.failures[-4:]:  # a disk that stays full must not fill the memory too
            return
        self.failures.append(failure)
        if not is_shared or self.rank == 0:
            log.error(
                "torchscout itself failed at step %d; training is not affected", self.step, exc_info=error
            )
