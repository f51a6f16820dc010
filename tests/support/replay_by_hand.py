"""A source and its peers in one process, whose replays are driven call by call, in the numbered order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchscout.replay.recipe import Observation, Replay, finish_signatures
from torchscout.utils.reentrancy import own_work

CPU = torch.device("cpu")


def described(replays: Sequence[Replay]) -> list[Any]:
    """Return every peer's description as it arrives at the others."""
    return [json.loads(json.dumps(replay.describe())) for replay in replays]


def prepare(replays: Sequence[Replay], source: int = 0) -> list[Any]:
    descriptions = described(replays)
    for replay in replays:
        replay.prepare(descriptions, source)
    return descriptions


def align(replays: Sequence[Replay], source: int = 0) -> None:
    """Describe, prepare, and let the peers receive the source's bytes."""
    prepare(replays, source)
    sent: list[torch.Tensor] = []
    replays[source].align(lambda tensor: sent.append(tensor.clone()))
    for place, replay in enumerate(replays):
        if place != source:
            replay.align(receiver(sent))


def receiver(sent: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Return the receiving end of a broadcast."""
    pending = iter(sent)

    def receive(tensor: torch.Tensor) -> None:
        values = next(pending)
        assert tensor.is_contiguous()
        assert (tensor.dtype, tensor.shape) == (values.dtype, values.shape)
        tensor.copy_(values)

    return receive


def observe(replay: Replay, variant: float = 1.0) -> dict[str, int]:
    """Observe as the replayer does: with SCOUT's own hooks inert."""
    seen = Observation(variant)
    with own_work():
        replay.observe(seen)
    finish_signatures([seen])
    return seen.signatures


def observations(replays: Sequence[Replay], variant: float = 1.0) -> list[dict[str, int]]:
    """Observe on each peer, with a different random state on each."""
    found = []
    for place, replay in enumerate(replays):
        torch.manual_seed(place)
        random.seed(place)
        np.random.seed(place)
        found.append(observe(replay, variant))
    for replay, signatures in zip(replays, found, strict=True):
        assert sorted(signatures) == sorted(each.surface for each in replay.comparisons())
    return found


def differing(found: Sequence[dict[str, int]]) -> set[str]:
    """Return the surfaces on which peers differ."""
    assert all(each.keys() == found[0].keys() for each in found)
    return {surface for surface in found[0] if len({each[surface] for each in found}) > 1}
