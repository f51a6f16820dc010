"""Tensors on their way from the source replica to its peers (paper, section 6.1.1, "Identical inputs").

The source describes what it has captured, peers make room for it, and the bytes follow once everybody
is ready. What a tensor is used for is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchscout.errors import ReplayError
from torchscout.evidence.replay.recipe import Broadcast

__all__ = ["captured", "densely", "described", "flat", "is_dense", "receive", "refuse", "room_for"]


def captured(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that later training cannot change; dense, with the strides of the original where they are."""
    refuse(tensor)
    return tensor.detach().resolve_conj().resolve_neg().clone()


def refuse(tensor: torch.Tensor) -> None:
    """Raise ``ReplayError`` for what does not travel as plain bytes."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ReplayError(f"a {type(tensor).__name__} is among the inputs")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ReplayError(f"a {tensor.layout} tensor of {tensor.dtype} is among the inputs")


def densely(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as plain bytes in one block, itself where it is that; expanded and sliced ones are not."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain if is_dense(plain) else plain.clone()


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """What a peer must know to make room for what ``captured`` makes, or has made, of this tensor."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.shape),
        "stride": list(_dense_stride(tensor)),
        "device": tensor.device.type,
    }


def room_for(description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """An uninitialized tensor as described; ``device`` is this rank's own accelerator, or the CPU."""
    where = device if description["device"] == device.type else torch.device(description["device"])
    dtype = getattr(torch, description["dtype"])
    return torch.empty_strided(description["size"], description["stride"], dtype=dtype, device=where)


def receive(tensors: Iterable[torch.Tensor], broadcast: Broadcast) -> None:
    """Fill the tensors with the source's bytes, one by one."""
    for tensor in tensors:
        if tensor.numel():
            # As bytes in the order of memory: any dtype travels, and dense strides need no copy.
            broadcast(flat(tensor).view(torch.uint8))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a copy has: the tensor's own strides if it fills its memory, else the same order without gaps."""
    return torch.empty_like(tensor, device="meta").stride()
