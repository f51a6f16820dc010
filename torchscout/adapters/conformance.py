"""What every adapter promises, as a trial run: for the tests of those who write one (paper, section 9).

Nothing here is used while a job runs. That replay is right for a framework shows only in training that is
bitwise the same with it, which is for tests of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchscout.adapters.base import Adapter
from torchscout.decision.signature import signature
from torchscout.mesh import LayerKind, Mesh
from torchscout.replay.sharded_parameters import gathered

__all__ = ["check_adapter"]


def check_adapter(adapter: Adapter, train_step: Callable[[], None]) -> list[str]:
    """What the adapter does otherwise than ``Adapter`` says, a sentence each.

    Called on every rank of a small job with several ranks; ``train_step`` is one training step of it.
    """
    obstacle = adapter.obstacle
    broken = [*_differing("obstacle", obstacle, range(dist.get_world_size()))]
    mesh = adapter.mesh(["here"] * dist.get_world_size())
    peers = mesh.peers_of(dist.get_rank(), LayerKind.DENSE).ranks
    broken += _mesh(mesh, peers)
    if obstacle is not None:
        return broken  # whose job is not replayed has nothing else to promise
    train_step()  # frameworks build their state in the first
    broken += [*_parts(adapter, peers), *_tensors(adapter, peers)]
    broken += [*_updates(adapter, train_step), *_keepers(adapter), *_state(adapter)]
    return broken


def _differing(what: str, own: Any, peers: Collection[int]) -> Iterator[str]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if any(told[rank] != own for rank in peers):
        found = {rank: told[rank] for rank in peers}
        yield f"{what} must be the same on ranks {tuple(peers)}, and is {found}"


def _mesh(mesh: Mesh, peers: Sequence[int]) -> Iterator[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(mesh) != world:
        yield f"mesh has {len(mesh)} ranks, and the job {world}"
    elif rank not in peers:
        yield f"mesh has rank {rank} not among its own peers, {peers}"
    else:
        yield from _differing("peers", tuple(peers), peers)


def _parts(adapter: Adapter, peers: Collection[int]) -> Iterator[str]:
    structure = adapter.structure()
    named = {
        "embedding": structure.embeddings,
        "layers": structure.layers,
        "output": structure.outputs,
        "experts": adapter.experts(),
    }
    inside = {id(each) for each in adapter.model.modules()}
    for what, parts in named.items():
        if strange := [each.name for each in parts if id(each.module) not in inside]:
            yield f"{what} must be modules of model, and {', '.join(strange)} are not"
    if strange := [type(each).__name__ for each in adapter.layers() if id(each) not in inside]:
        yield f"layers() must be modules of model, and {', '.join(strange)} are not"
    if not adapter.layers():
        yield "layers() has none"
    dense = {what: [each.name for each in parts] for what, parts in named.items() if what != "experts"}
    yield from _differing("structure's names", dense, peers)


def _tensors(adapter: Adapter, peers: Collection[int]) -> Iterator[str]:
    held = adapter.parameters()
    known = {id(each) for each in held.values()}
    if lost := [name for name, each in adapter.model.named_parameters() if id(each) not in known]:
        yield f"parameters() must have all of the model's, and lacks {', '.join(lost)}"
    if strange := sorted({*adapter.unreplicated()} - held.keys()):
        yield f"unreplicated() must be among parameters(), and {', '.join(strange)} are not"
    if wrong := [
        type(each).__name__ for each in adapter.optimizers() if not isinstance(each, torch.optim.Optimizer)
    ]:
        yield f"optimizers() must be PyTorch's, and {', '.join(wrong)} are not"
    yield from _differing("parameters()'s names", sorted(held), peers)
    yield from _differing("owned()'s names", sorted(adapter.owned()), peers)


def _updates(adapter: Adapter, train_step: Callable[[], None]) -> Iterator[str]:
    heard: dict[str, list[str]] = {"first": [], "second": []}
    seen: dict[str, Mapping[str, int]] = {}

    def before() -> None:
        heard["first"].append("before")
        seen["before"] = _bits(adapter)

    def after() -> None:
        heard["first"].append("after")
        adapter.finish_update()
        seen["after"] = _bits(adapter)

    leave = adapter.hook_updates(before, after)
    other = heard["second"]
    leave_too = adapter.hook_updates(lambda: other.append("before"), lambda: other.append("after"))
    train_step()
    if (own := _bits(adapter)) != seen.get("after", own):
        late = sorted(name for name, each in own.items() if seen["after"].get(name) != each)
        yield f"after must come when parameters are new, and {', '.join(late[:3])} changed later"
    if seen and seen.get("before") == seen.get("after"):
        yield "before must come before the update, and nothing changed between it and after"
    leave()
    train_step()
    leave_too()
    train_step()
    for who, steps in (("first", 1), ("second", 2)):
        if heard[who] != ["before", "after"] * steps:
            yield f"hook_updates must call before and after once a step: of {steps} it told {heard[who]}"


def _bits(adapter: Adapter) -> dict[str, int]:
    """Of all that updates change, as far as this rank has it."""
    tensors = {**adapter.parameters(), **adapter.owned(), **adapter.owned(LayerKind.EXPERT)}
    return {
        name: signature((each.to_local() if isinstance(each, DTensor) else each).detach())
        for name, each in tensors.items()
    }


def _keepers(adapter: Adapter) -> Iterator[str]:
    for layer in adapter.layers()[:1]:
        gatherers, own = adapter.gatherers(layer), _bits(adapter)
        if gatherers.obstacle is None:
            with gathered(gatherers, nullcontext()):
                if empty := [name for name, each in layer.named_parameters() if not each.numel()]:
                    yield f"gatherers() must gather a layer whole, and leaves {', '.join(empty)} empty"
        if _bits(adapter) != own:
            yield "gatherers() must leave parameters as they were"


def _state(adapter: Adapter) -> Iterator[str]:
    for name, each in adapter.state().items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            yield f"state() has {name!r} without state_dict() and load_state_dict()"
            continue
        own = each.state_dict()
        each.load_state_dict(own)
        if str(each.state_dict()) != str(own):
            yield f"state() has {name!r}, which is not the same once it is loaded again"
