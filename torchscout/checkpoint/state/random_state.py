"""Saves and restores the random state of PyTorch, its devices, NumPy and Python (paper, section 9).

Generators that modules or loaders own are saved by whoever registers them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["difference", "now", "restore"]


def now(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The current random state, including that of the devices that these tensors are on."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "devices": {
            kind: [torch.get_device_module(kind).get_rng_state(index) for index in indices]
            for kind, indices in _devices(tensors).items()
        },
        "numpy": np.random.get_state(legacy=False),
        # One array, because encoding 625 separate integers would dominate the time.
        "python": (version, np.array(words, dtype=np.uint64), gauss),
    }


def difference(kept: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> str | None:
    """Why this random state cannot be restored here; None if it can."""
    here = {kind: len(indices) for kind, indices in _devices(tensors).items()}
    there = {kind: len(states) for kind, states in kept["devices"].items()}
    saved, found = there or "none", here or "none"
    return None if here == there else f"random state was saved for devices {saved}, but there are {found}"


def restore(kept: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> None:
    torch.set_rng_state(kept["torch"])
    for kind, indices in _devices(tensors).items():
        for index, state in zip(indices, kept["devices"][kind], strict=True):
            torch.get_device_module(kind).set_rng_state(state, index)
    np.random.set_state(kept["numpy"])
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def _devices(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Device indices by type, sorted: after a restart a rank may have other indices, in the same order."""
    found: dict[str, set[int]] = defaultdict(set)
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            found[device.type].add(device.index)
    return {kind: sorted(indices) for kind, indices in sorted(found.items())}
