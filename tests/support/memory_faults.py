"""Bits that change in memory by themselves."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from torchscout.faults.effects import FlipBit

__all__ = ["flip_in_memory"]


def flip_in_memory(tensor: torch.Tensor, bit: int) -> bool:
    """Flip a bit of the local part without PyTorch counting it as a write; return whether it has changed."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    before, version = local.clone(), local._version
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):
        FlipBit(bit).corrupt(local)
    assert local._version == version
    return not torch.equal(before, local)
