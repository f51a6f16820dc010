"""Parameters as a forward pass sees them, where FSDP keeps them in shards (paper, algorithm 2, line 8).

Gathering goes through FSDP's own calls and groups, as in training; what a layer computes from the gathered
parameters is ``layer``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["NOBODY", "Keepers", "gathered", "keepers_of"]


@dataclass(frozen=True, slots=True)
class Keepers:
    """The FSDP modules that keep one module's parameters."""

    modules: tuple[FSDPModule, ...] = ()
    """It, those inside it, or else the nearest around it: an embedding or output layer is mostly kept by the
    whole model, which gathers only what no part of it keeps."""
    root: FSDPModule | None = None
    """The outermost FSDP module around it."""


NOBODY = Keepers()


def keepers_of(model: nn.Module, module: nn.Module) -> Keepers:
    around = [each for each in _path(model, module) if isinstance(each, FSDPModule)]
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    nearest = [] if isinstance(module, FSDPModule) else around[-1:]
    return Keepers((*nearest, *inside), next(iter([*around, *inside]), None))


@contextmanager
def gathered(keepers: Keepers) -> Iterator[None]:
    """In this block the kept parameters are whole; afterwards they are shards again."""
    for keeper in keepers.modules:
        keeper.unshard()
    is_over = False
    try:
        yield
        is_over = True
    finally:
        # After an exception FSDP believes that a pass is still under way, and training's next one would fail.
        # From PyTorch 2.13 on it can be told otherwise; nothing else is under way right after an update.
        if not is_over and keepers.root is not None and hasattr(keepers.root, "reset_iter_state"):
            keepers.root.reset_iter_state()
        for keeper in keepers.modules:
            keeper.reshard()


def _path(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that contain a module, from the outside in."""
    dotted = next((name for name, each in model.named_modules() if each is module), "")
    parts = dotted.split(".") if dotted else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
