"""Checks an adapter against its protocol; for the tests of adapters (paper, section 9).

That replay is correct for a framework can only be shown by training that is bitwise the same with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchscout.adapters.base import Adapter
from torchscout.c3.signature import signature
from torchscout.mesh import LayerKind, Mesh
from torchscout.replay.sharded_parameters import gathered

__all__ = ["check_adapter"]


def check_adapter(adapter: Adapter, train_step: Callable[[], None]) -> list[str]:
    """Return one sentence for each violation of ``Adapter``; empty if there is none.

    Call it on every rank of a small job with several ranks. ``train_step`` runs one training step.
    """
    obstacle = adapter.obstacle
    everybody = range(dist.get_world_size())
    violations = [*_differing("obstacle", obstacle, everybody)]
    violations += _differing("layer_obstacle", adapter.layer_obstacle, everybody)
    mesh = adapter.mesh(["here"] * dist.get_world_size())
    peers = mesh.peers_of(dist.get_rank(), LayerKind.DENSE).ranks
    violations += _mesh(mesh, peers)
    if obstacle is not None:
        return violations  # a job that is not replayed needs nothing else
    train_step()  # frameworks create their state in the first step
    violations += [*_parts(adapter, peers), *_tensors(adapter, peers)]
    return [*violations, *_updates(adapter, train_step), *_gatherers(adapter), *_state(adapter)]


def _differing(what: str, own: Any, peers: Collection[int]) -> Iterator[str]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    if any(by_rank[rank] != own for rank in peers):
        found = {rank: by_rank[rank] for rank in peers}
        yield f"{what} must be the same on ranks {tuple(peers)}, but is {found}"


def _mesh(mesh: Mesh, peers: Sequence[int]) -> Iterator[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(mesh) != world:
        yield f"mesh() has {len(mesh)} ranks, but the job has {world}"
    elif rank not in peers:
        yield f"mesh() does not have rank {rank} among its own peers, {peers}"
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
        if unknown := [each.name for each in parts if id(each.module) not in inside]:
            yield f"{what} must be modules of the model, but these are not: {', '.join(unknown)}"
    if unknown := [type(each).__name__ for each in adapter.layers() if id(each) not in inside]:
        yield f"layers() must be modules of the model, but these are not: {', '.join(unknown)}"
    if not adapter.layers():
        yield "layers() is empty"
    dense = {what: [each.name for each in parts] for what, parts in named.items() if what != "experts"}
    yield from _differing("structure's names", dense, peers)


def _tensors(adapter: Adapter, peers: Collection[int]) -> Iterator[str]:
    held = adapter.parameters()
    known = {id(each) for each in held.values()}
    if lost := [name for name, each in adapter.model.named_parameters() if id(each) not in known]:
        yield f"parameters() must contain all of the model's, but lacks {', '.join(lost)}"
    if unknown := sorted({*adapter.unreplicated_parameters()} - held.keys()):
        yield f"unreplicated_parameters() must be in parameters(), but these are not: {', '.join(unknown)}"
    if wrong := [
        type(each).__name__ for each in adapter.optimizers() if not isinstance(each, torch.optim.Optimizer)
    ]:
        yield f"optimizers() must be PyTorch's, but these are not: {', '.join(wrong)}"
    state = {**held, **adapter.owned_state()}
    for name, unused in adapter.padding().items():
        size = state[name].numel() if name in state else 0
        ends = [0, *(place for each in unused for place in (each.start, each.stop)), size]
        if ends != sorted(ends):
            yield f"padding() must be ranges of elements, ascending, but {name} with {size} has {[*unused]}"
    yield from _differing("parameters()'s names", sorted(held), peers)
    yield from _differing("owned_state()'s names", sorted(adapter.owned_state()), peers)


def _updates(adapter: Adapter, train_step: Callable[[], None]) -> Iterator[str]:
    calls: dict[str, list[str]] = {"first": [], "second": []}
    seen: dict[str, Mapping[str, int]] = {}

    def before() -> None:
        calls["first"].append("before")
        seen["before"] = _bits(adapter)

    def after() -> None:
        calls["first"].append("after")
        adapter.finish_update()
        seen["after"] = _bits(adapter)

    remove = adapter.hook_updates(before, after)
    other = calls["second"]
    remove_second = adapter.hook_updates(lambda: other.append("before"), lambda: other.append("after"))
    train_step()
    if (own := _bits(adapter)) != seen.get("after", own):
        late = sorted(name for name, each in own.items() if seen["after"].get(name) != each)
        yield f"after must be called when parameters are new, but {', '.join(late[:3])} changed later"
    if seen and seen.get("before") == seen.get("after"):
        yield "before must be called before the update, but nothing changed between it and after"
    remove()
    train_step()
    remove_second()
    train_step()
    for hook, steps in (("first", 1), ("second", 2)):
        if calls[hook] != ["before", "after"] * steps:
            yield f"hook_updates must call before and after once a step, but called {calls[hook]} in {steps}"


def _bits(adapter: Adapter) -> dict[str, int]:
    """Signatures of everything that updates change on this rank."""
    tensors = {**adapter.parameters(), **adapter.owned_state(), **adapter.owned_state(LayerKind.EXPERT)}
    return {
        name: signature((each.to_local() if isinstance(each, DTensor) else each).detach())
        for name, each in tensors.items()
    }


def _gatherers(adapter: Adapter) -> Iterator[str]:
    for layer in adapter.layers()[:1]:
        gatherers, own = adapter.gatherers(layer), _bits(adapter)
        if gatherers.obstacle is None:
            with gathered(gatherers, nullcontext()):
                if empty := [name for name, each in layer.named_parameters() if not each.numel()]:
                    yield f"gatherers() must gather a whole layer, but leaves {', '.join(empty)} empty"
        if _bits(adapter) != own:
            yield "gatherers() must not change parameters"


def _state(adapter: Adapter) -> Iterator[str]:
    for name, each in adapter.extra_state().items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            yield f"extra_state() has {name!r} without state_dict() and load_state_dict()"
            continue
        own = each.state_dict()
        each.load_state_dict(own)
        if str(each.state_dict()) != str(own):
            yield f"extra_state() has {name!r}, which is not the same after it was loaded again"
