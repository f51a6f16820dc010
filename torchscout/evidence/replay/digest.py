"""Several tensors as one 64-bit integer (paper, section 5.2): equal only where every one of them is.

For what is compared as one, such as all inputs of a replay; tensors that are to be told apart get a
``signature`` each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import torch
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.signature import signatures

__all__ = ["as_one", "digest"]


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A signed 64-bit integer; which tensor comes first matters. ``ValueError`` for what has no bytes."""
    return as_one(signatures(tensors))


def as_one(found: Sequence[int]) -> int:
    """The digest of tensors whose signatures are these."""
    return signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(found)}q", *found)))
