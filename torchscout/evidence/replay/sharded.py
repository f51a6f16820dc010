"""Parameters as a forward pass sees them, where shards of them are kept (paper, algorithm 2, line 8).

Gathering goes through the calls and groups of FSDP, or of another framework, as in training; what a layer
computes from the gathered parameters is ``layer``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchscout.evidence.replay import fsdp_state
from torchscout.evidence.replay.guard import announced
from torchscout.evidence.replay.reduction import Route

__all__ = ["NOBODY", "Elsewhere", "Keeper", "Keepers", "awaken", "gathered", "gathered_again", "keepers_of"]

Elsewhere = Callable[[torch.Tensor], torch.Tensor | None]
"""Where the gradient of a parameter is, if backward does not return it."""


class Keeper(Protocol):
    """Who gathers parameters: an FSDP module, or what does so for another framework."""

    def unshard(self) -> Any:
        """Let a module be called: on every rank, or on none."""
        ...

    def reshard(self) -> Any:
        """Be as before that."""
        ...


@dataclass(frozen=True, slots=True)
class Keepers:
    """Those who keep one module's parameters."""

    modules: tuple[Keeper, ...] = ()
    """It, those inside it, or else the nearest around it: an embedding or output layer is mostly kept by the
    whole model, which gathers only what no part of it keeps."""
    root: FSDPModule | None = None
    """The outermost FSDP module around it."""
    copies: bool = True
    """Whether peers keep the same shards."""
    is_mixed: bool = False
    """Whether peers gather from the shards of several replicas, each from those of its own."""
    route: Route | None = None
    """Which way its gradients go, where that is replayed too."""
    together: frozenset[int] = frozenset()
    """The ranks that compute one call of the module together, in tensor or context parallelism."""
    around: Callable[[], AbstractContextManager[Elsewhere | None]] = nullcontext
    """Entered around each replay of the module: puts back what its passes write besides."""

    kept_among: frozenset[int] = frozenset()
    """The ranks among which shards are gathered and gradients reduced, as far as that is known."""

    @property
    def expected(self) -> frozenset[int]:
        """The ranks with which training itself communicates while it runs the module."""
        return self.together | self.kept_among

    @property
    def obstacle(self) -> str | None:
        """Why calling a kept module could harm training: a failed call would look like a pass under way."""
        lacking = None if self.root is None else fsdp_state.missing(self.root)
        return lacking and f"FSDP cannot forget a replayed pass: this PyTorch has no {lacking}"


NOBODY = Keepers()


def keepers_of(model: nn.Module, module: nn.Module) -> Keepers:
    around = [each for each in _path(model, module) if isinstance(each, FSDPModule)]
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    nearest = [] if isinstance(module, FSDPModule) else around[-1:]
    return Keepers((*nearest, *inside), next(iter([*around, *inside]), None))


def awaken(keepers: Keepers) -> None:
    """Let FSDP find out which module is the outermost, as it does in the first pass over the whole model.

    A part that is called before that would take itself for the whole. A ``ReplayError`` says if it cannot.
    """
    if keepers.root is not None:
        fsdp_state.initialize(keepers.root)


@contextmanager
def gathered(keepers: Keepers, gathering: AbstractContextManager[None]) -> Iterator[None]:
    """In this block the kept parameters are whole; afterwards they are shards again, and FSDP has forgotten.

    It counts which of several modules that are kept as one were called: were only one of them replayed, it
    would reduce the next step's gradients in other portions. ``gathering`` is entered while parameters are
    being gathered.
    """
    with gathering, announced():
        for keeper in keepers.modules:
            keeper.unshard()
    try:
        with fsdp_state.without_prefetch(keepers.modules):
            yield
    finally:
        with announced():
            for keeper in keepers.modules:
                keeper.reshard()
        _forget(keepers)


@contextmanager
def gathered_again(keepers: Keepers) -> Iterator[None]:
    """Around a forward pass: afterwards the parameters are gathered once more, even if it has failed.

    FSDP may let go of them after a forward pass and gather them in backward, to which a rank that has failed
    would not come. So it is done here, by all ranks alike, and backward finds them there.
    """
    try:
        with _forgetting_failures(keepers):
            yield
    finally:
        with announced():
            for keeper in keepers.modules:
                keeper.reshard()
                keeper.unshard()


@contextmanager
def _forgetting_failures(keepers: Keepers) -> Iterator[None]:
    is_over = False
    try:
        yield
        is_over = True
    finally:
        if not is_over:
            _forget(keepers)


def _forget(keepers: Keepers) -> None:
    """Nothing of training's own is under way right after an update, so that nothing is lost."""
    if keepers.root is not None:
        fsdp_state.reset(keepers.root)


def _path(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that contain a module, from the outside in."""
    dotted = next((name for name, each in model.named_modules() if each is module), "")
    parts = dotted.split(".") if dotted else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
