"""Tensors on their way from the source replica to its peers (paper, section 6.1.1, "Identical inputs").

The source describes what it has captured, peers make room for it, and the bytes follow once everybody
is ready. Of a DTensor only what this rank holds travels. What a tensor is used for is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torchscout.errors import ReplayError
from torchscout.evidence.replay.layout import Layout, local_part

__all__ = [
    "Broadcast",
    "captured",
    "densely",
    "described",
    "flat",
    "is_dense",
    "obstacle",
    "receive",
    "receive_together",
    "refuse",
    "room_for",
]


Broadcast = Callable[[torch.Tensor], None]
"""Fills a contiguous tensor, on every peer, with what the source's holds; by the time of the computation."""
_PACKED = 1 << 20
"""Bytes up to which a tensor in host memory travels together with others."""


def captured(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that later training cannot change; dense, with the strides of the original where they are."""
    refuse(tensor)
    return _laid_out(local_part(tensor).detach().resolve_conj().resolve_neg().clone(), tensor)


def refuse(tensor: torch.Tensor) -> None:
    """Raise ``ReplayError`` for what does not travel as plain bytes."""
    if (found := obstacle(tensor)) is not None:
        raise ReplayError(f"{found} is among the inputs")


def obstacle(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, if one that does not travel as plain bytes."""
    layout, local = Layout.of(tensor), tensor
    if layout is not None:
        if layout.obstacle is not None:
            return f"a DTensor placed as {layout.obstacle}"
        local = tensor._local_tensor  # type: ignore[attr-defined]  # not awaited: peers look without reading
    if type(local) not in (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor):
        return f"a {type(local).__name__}" if layout is None else f"a DTensor of {type(local).__name__}"
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        return f"a {local.layout} tensor of {local.dtype}"
    return None


def densely(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as plain bytes in one block, itself where it is that; expanded and sliced ones are not."""
    plain = local_part(tensor).resolve_conj().resolve_neg()
    return _laid_out(plain if is_dense(plain) else plain.clone(), tensor)


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """What a peer must know to make room for what ``captured`` makes, or has made, of this tensor."""
    local, layout = local_part(tensor), Layout.of(tensor)
    return {
        "dtype": str(local.dtype).removeprefix("torch."),
        "size": list(local.shape),
        "stride": list(_dense_stride(local)),
        "device": local.device.type,
        **({} if layout is None else {"layout": layout.describe()}),
    }


def room_for(description: Mapping[str, Any], device: torch.device, own: Layout | None = None) -> torch.Tensor:
    """An uninitialized tensor as described; ``device`` is this rank's own accelerator, or the CPU.

    ``own`` is how this rank's tensor of the same use lies on a mesh, where that is a DTensor.
    """
    told = description.get("layout")
    if (told is None) != (own is None):
        here, there = ("no DTensor", "one") if own is None else ("a DTensor", "none")
        raise ReplayError(f"there is {here} here and {there} on the source")
    where = device if description["device"] == device.type else torch.device(description["device"])
    dtype = getattr(torch, description["dtype"])
    room = torch.empty_strided(description["size"], description["stride"], dtype=dtype, device=where)
    return room if told is None or own is None else own.like(told).wrap(room)


def receive(tensors: Iterable[torch.Tensor], broadcast: Broadcast) -> None:
    """Fill the tensors with the source's bytes, one by one."""
    for tensor in tensors:
        if local_part(tensor).numel():
            # As bytes in the order of memory: any dtype travels, and dense strides need no copy.
            broadcast(flat(local_part(tensor)).view(torch.uint8))


def receive_together(tensors: Sequence[torch.Tensor], broadcast: Broadcast) -> None:
    """Fill contiguous tensors of bytes with the source's, the small ones in host memory by one broadcast.

    Each broadcast among hosts is a round trip that everybody waits for; those among devices are not.
    """
    small = [each for each in tensors if each.is_cpu and each.numel() <= _PACKED]
    for each in tensors:
        if not each.is_cpu or each.numel() > _PACKED or len(small) == 1:
            broadcast(each)
    if len(small) > 1:
        packed = torch.cat(small)
        broadcast(packed)
        place = 0
        for each in small:
            each.copy_(packed[place : place + each.numel()])
            place += each.numel()


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


def _laid_out(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory as a DTensor, where that is what it was taken from."""
    layout = Layout.of(like)
    if layout is None or not isinstance(like, DTensor):
        return local
    again = layout.wrap(local)
    if again._spec != like._spec:
        raise ReplayError(f"a DTensor in an order of its own, {like._spec}, cannot be described to peers")
    return again


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a copy has: the tensor's own strides if it fills its memory, else the same order without gaps."""
    return torch.empty_like(tensor, device="meta").stride()
