"""The entry point of ``torchrun --rdzv-backend=scout``.

Every torchrun on a machine with torchscout loads this module, so it imports nothing before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["rendezvous_creator"]


def rendezvous_creator() -> Callable[[Any], Any]:
    """Return the function that makes a rendezvous handler from torchrun's parameters."""
    return _create


def _create(parameters: Any) -> Any:
    from torchscout.plugins.rendezvous import create_handler

    return create_handler(parameters)
