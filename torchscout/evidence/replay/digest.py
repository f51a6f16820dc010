"""Several tensors as one 64-bit integer (paper, section 5.2): equal only where every one of them is.

For what is compared as one, such as all inputs of a replay; tensors that are to be told apart get a
``signature`` each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.signature import signatures

__all__ = ["digest"]


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A signed 64-bit integer; which tensor comes first matters. ``ValueError`` for what has no bytes."""
    each = signatures(tensors)
    return signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(each)}q", *each)))
