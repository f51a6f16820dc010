"""When the optimizers that frameworks wrap update, and what is written besides (paper, section 9).

They have no hooks. PyTorch's own have: see ``integration.pytorch.around_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from torchscout.decision.record import Surface
from torchscout.integration.structure import surface_of

__all__ = ["Updates", "overwritten"]

Undo = Callable[[], None]


def overwritten(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """The parameters that are trained, though optimizers update something else in their place."""
    own = {surface_of(name): each for name, each in model.named_parameters()}
    updated = {id(each) for of in optimizers for group in of.param_groups for each in group["params"]}
    if updated <= {id(each) for each in own.values()}:
        return {}
    return {name: each for name, each in own.items() if each.requires_grad and id(each) not in updated}


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
