"""One bit of what a rank holds changes, as memory does it: PyTorch does not count a write."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from torchscout.faults.effects import FlipBit

MOMENTS = ("before forward", "before backward", "before the update")
"""When in a step a bit may flip; the update of the step before is over, its own has not begun."""
Held = Mapping[str, Sequence[torch.Tensor]]
"""What a rank holds, by kind: ``weight``, ``exp_avg``, ``exp_avg_sq``, ``master``, ``working copy``."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Planned without knowing what the rank holds."""

    rank: int
    step: int
    moment: str
    seed: int
    """Decides on the tensor, the element and the bit."""


@dataclass(frozen=True, slots=True)
class Flipped:
    """What has happened."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    index: int
    bit: int
    was: float
    became: float


def flip_a_bit(held: Held, seed: int) -> Flipped:
    """Raises if the bits are the same afterwards, or if PyTorch has counted a write."""
    draw = random.Random(seed)
    local = {kind: [_local(each) for each in tensors] for kind, tensors in held.items()}
    local = {kind: found for kind, every in local.items() if (found := [e for e in every if e.numel()])}
    kind = draw.choice(sorted(local))
    place = draw.randrange(len(local[kind]))
    tensor = local[kind][place]
    index, bit = draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size())
    before, versions = tensor.clone(), _versions(held)
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        if FlipBit(bit, index).corrupt(tensor) is None:
            raise RuntimeError(f"bit {bit} of element {index} of {kind} {place} has not flipped")
    if _versions(held) != versions:
        raise RuntimeError("PyTorch has counted the flip as a write")
    was, became = (float(each.reshape(-1)[index]) for each in (before, tensor))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Flipped(kind, dtype, tuple(tensor.shape), index, bit, was, became)


def digest_of(held: Held) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for kind in sorted(held):
        for each in held[kind]:
            digest.update(_local(each).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _versions(held: Held) -> list[int]:
    whole = [each for tensors in held.values() for each in tensors]
    return [each._version for each in whole] + [_local(each)._version for each in whole]
