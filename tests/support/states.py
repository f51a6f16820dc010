"""Jobs that are interrupted, and their state after it was written and read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, decode, encode
from torchscout.state import encoding
from torchscout.state.collect import State, Stateful, StateParts, collect
from torchscout.state.layout import bytes_of, dtype_named, fill, name_of
from torchscout.state.restore import require_as_saved, restore


def identity(step: int = 1, *, rank: int = 0, world_size: int = 1) -> ShardIdentity:
    return ShardIdentity(
        job="job", mesh="none", world_size=world_size, rank=rank, generation=Generation(step)
    )


def blob_of(name: str, tensor: torch.Tensor) -> Blob:
    """Return a tensor's bytes, as a snapshot copies them."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    fill(memory, tensor)
    return Blob(name, name_of(tensor.dtype), tuple(tensor.shape), bytes_of(memory), memory)


def save(path: Path, whose: ShardIdentity, role: TrustLevel, tree: Any) -> None:
    """Write a state to its own file."""
    document, tensors = encoding.encode(tree)
    blobs = [blob_of(name, tensor) for name, tensor in tensors.items()]
    shards.write(path, encode(whose, role, document, blobs))


def through_bytes(state: State) -> Any:
    """Encode and decode a state; return the tree that another process would read."""
    blobs = [blob_of(name, tensor) for name, tensor in state.tensors.items()]
    pieces = encode(identity(), TrustLevel.LATEST, state.document, blobs)
    header, memory = decode(b"".join(pieces))
    tensors = {
        each.name: torch.frombuffer(bytearray(memory[each.name]) or bytearray(16), dtype=torch.uint8)
        .clone()[: each.length]
        .view(dtype_named(each.dtype))
        .view(each.shape)
        for each in header.entries
    }
    return encoding.decode(header.document, tensors)


@dataclass
class Job:
    """Something that trains."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    registered: Mapping[str, Stateful] = field(default_factory=dict)

    def step(self, number: int) -> None:
        """Train one step with the default loss for models of eight inputs."""
        generator = torch.Generator().manual_seed(number)
        noise = random.random() + np.random.rand()
        x = torch.randn(4, 8, generator=generator) + noise
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(x).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for each in self.registered.values():
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                each.step()

    def train(self, steps: range) -> None:
        for number in steps:
            self.step(number)

    def collect(self) -> State:
        return collect(StateParts(self.model, self.optimizers, self.registered))

    def restore(self, kept: Any) -> None:
        require_as_saved(restore(StateParts(self.model, self.optimizers, self.registered), kept), {})


def interrupted(make: Any, *, at: int = 3, steps: int = 7) -> tuple[Job, Job]:
    """Return an uninterrupted job, and one that was resumed from its checkpoint after ``at`` steps."""
    seed(0)
    whole = make()
    whole.train(range(at))
    kept = through_bytes(whole.collect())
    whole.train(range(at, steps))
    whole.streams = streams()
    seed(99)
    resumed = make()
    resumed.restore(kept)
    resumed.train(range(at, steps))
    resumed.streams = streams()
    return whole, resumed


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())


def all_bits(job: Job) -> dict[str, Any]:
    """Return every bit of a job, by name, with kinds and layouts."""
    found: dict[str, Any] = {}
    for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]:
        found[name] = _bits(tensor)
    for number, optimizer in enumerate(job.optimizers):
        keys = {
            parameter: f"{place}.{index}"
            for place, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        for key, slots in optimizer.state.items():
            found[f"{number} {keys.get(key, key)}"] = _comparable(slots)
        for place, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            found[f"{number} group {place}"] = _comparable(settings)
    found["registered"] = {name: _comparable(each.state_dict()) for name, each in job.registered.items()}
    return found


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _bits(value)
    if isinstance(value, dict):
        return type(value).__name__, {repr(key): _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_comparable(each) for each in value]
    return type(value).__name__, repr(value)


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    placed = ()
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            placed = (str(tensor.placements), tuple(tensor.shape), tuple(tensor.device_mesh.shape))
            tensor = tensor.to_local()
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), str(tensor.device), placed, data


def walk_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from walk_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from walk_tensors(each)
