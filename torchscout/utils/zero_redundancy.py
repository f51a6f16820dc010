"""Recognizes ``ZeroRedundancyOptimizer`` without importing it.

``torch.distributed.optim`` compiles TorchScript when it is imported, which takes as long as all of torchscout
does. A program that has such an optimizer has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["inner_of"]

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that a ``ZeroRedundancyOptimizer`` wraps; None for any other optimizer."""
    module = sys.modules.get(_MODULE)
    is_wrapper = module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
    return optimizer.optim if is_wrapper else None
