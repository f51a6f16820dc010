"""Several tensors as one 64-bit integer (paper, section 5.2): equal only where every one of them is.

For what is compared as one, such as all inputs of a replay; tensors that are to be told apart get a
``signature`` each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from torchscout.decision.fold import signed

__all__ = ["digest"]


def digest(signatures: Sequence[int]) -> int:
    """A signed 64-bit integer for tensors with these signatures; which tensor comes first matters."""
    return signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(signatures)}q", *signatures)))
