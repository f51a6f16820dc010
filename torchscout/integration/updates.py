"""Tells of the updates of an optimizer that has no hooks for it, as those that frameworks wrap (section 9).

PyTorch's own have hooks: see ``integration.pytorch.around_steps``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["Updates"]

Undo = Callable[[], None]


class Updates:
    """One optimizer's ``step``, and whoever is to be called around it.

    The method is replaced on the object while anybody listens. Whoever comes and goes may do so in any order:
    were each to wrap what it finds, the first to leave would take others along, or leave itself behind.
    """

    def __init__(self, optimizer: Any, meanwhile: Callable[[], Undo] = lambda: lambda: None) -> None:
        """``meanwhile`` is called when the first one comes, and what it returns when the last one leaves."""
        self._optimizer, self._meanwhile = optimizer, meanwhile
        self._listening: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._undo = ExitStack()

    def tell(self, before: Callable[[], None], after: Callable[[], None]) -> Undo:
        """Until what is returned is called; ``after`` comes once the whole step is over."""
        if not self._listening:
            self._begin()
        pair = (before, after)
        self._listening.append(pair)

        def leave() -> None:
            if pair in self._listening:
                self._listening.remove(pair)
                if not self._listening:
                    self._undo.close()

        return leave

    def _begin(self) -> None:
        optimizer = self._optimizer
        own, step = vars(optimizer).get("step"), optimizer.step

        def around(*args: Any, **kwargs: Any) -> Any:
            for before, _ in [*self._listening]:
                before()
            result = step(*args, **kwargs)
            for _, after in [*self._listening]:
                after()
            return result

        self._undo.callback(self._meanwhile())
        optimizer.step = around
        # What its class has is found again once the object has none of its own.
        self._undo.callback(
            *((delattr, optimizer, "step") if own is None else (setattr, optimizer, "step", own))
        )
