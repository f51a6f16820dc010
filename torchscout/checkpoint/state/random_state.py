"""Random streams of this process as part of its state: PyTorch's, the devices', NumPy's and Python's
(paper, section 9).

Streams that modules or loaders keep for themselves are for whoever registers them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["difference", "now", "put_back"]


def now(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Where every stream stands; of devices, those that these tensors are on."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "devices": {
            kind: [torch.get_device_module(kind).get_rng_state(index) for index in indices]
            for kind, indices in _devices(tensors).items()
        },
        "numpy": np.random.get_state(legacy=False),
        # As one array: 625 numbers by themselves would take longer than all else.
        "python": (version, np.array(words, dtype=np.uint64), gauss),
    }


def difference(kept: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> str | None:
    """Why these streams cannot be put back here, if they cannot."""
    here = {kind: len(indices) for kind, indices in _devices(tensors).items()}
    there = {kind: len(states) for kind, states in kept["devices"].items()}
    return (
        None if here == there else f"random streams were kept of devices {there or 'none'}, here are {here}"
    )


def put_back(kept: Mapping[str, Any], tensors: Iterable[torch.Tensor]) -> None:
    torch.set_rng_state(kept["torch"])
    for kind, indices in _devices(tensors).items():
        for index, state in zip(indices, kept["devices"][kind], strict=True):
            torch.get_device_module(kind).set_rng_state(state, index)
    np.random.set_state(kept["numpy"])
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def _devices(tensors: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """By kind, in order: after a restart a rank may have another one, and a list's place is what stays."""
    found: dict[str, set[int]] = defaultdict(set)
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            found[device.type].add(device.index)
    return {kind: sorted(indices) for kind, indices in sorted(found.items())}
