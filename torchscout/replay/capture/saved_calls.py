"""Calls that checks have replayed, kept for replaying them again without a training step (paper, section 8).

Whoever was the source of a replay keeps its call, in host memory and together with its checkpoints; so of
every layer one rank among its peers has the newest call. After a failure new workers sweep with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import flat, local_part
from torchscout.replay.capture.context import Attention
from torchscout.replay.capture.invocation import Invocation
from torchscout.utils._torch import treespec_dumps, treespec_loads

__all__ = ["SavedCall", "SavedCalls", "recalled"]

Key = tuple[str, str]
"""A recipe's kind and its target."""


@dataclass(frozen=True, slots=True)
class SavedCall:
    """One call as plain data."""

    call: Mapping[str, Any]
    """Its description, as peers are told of it, and how its arguments are put together."""
    tensors: tuple[torch.Tensor, ...]
    """Copies in host memory of what this rank holds; in the order of ``Invocation.tensors``."""

    @classmethod
    def of(cls, invocation: Invocation) -> SavedCall:
        """A ``ReplayError`` says why a call cannot be kept."""
        if invocation.attention.is_ring or invocation.buffers:
            raise ReplayError("it was made in a context_parallel block, which a later process is not in")
        call = invocation.describe()
        for place, leaf in enumerate(call["leaves"]):
            if "object" in leaf:
                raise ReplayError(f"argument {place} is {leaf['object']:.80}, which a file cannot hold")
        try:
            spec = treespec_dumps(invocation.spec)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ReplayError(f"the form of its arguments cannot be written down: {error}") from error
        return cls({**call, "spec": spec}, tuple(_copied(each) for each in invocation.tensors()))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


class SavedCalls:
    """What this rank keeps; part of its checkpoints, so with the methods of a stateful object."""

    def __init__(self) -> None:
        self.limit = 0
        """Bytes that may be kept; with 0 nothing is."""
        self._kept: dict[Key, SavedCall] = {}
        self.problems: dict[Key, str] = {}
        """Why the newest call of a target is not kept here, where it should be."""

    def __getitem__(self, key: Key) -> SavedCall | None:
        return self._kept.get(key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._kept)

    def keep(self, key: Key, invocation: Invocation) -> None:
        """This rank's call was replayed by all peers."""
        self.drop(key)
        if not self.limit:
            return
        try:
            kept = SavedCall.of(invocation)
        except ReplayError as error:
            self.problems[key] = str(error)
            return
        if (total := kept.nbytes + sum(each.nbytes for each in self._kept.values())) > self.limit:
            self.problems[key] = f"{total} bytes would be kept, and {self.limit} are allowed"
            return
        self._kept[key] = kept

    def drop(self, key: Key) -> None:
        """Another rank keeps a newer call of this target."""
        self._kept.pop(key, None)
        self.problems.pop(key, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": [
                {"kind": kind, "target": target, "call": json.dumps(each.call), "tensors": each.tensors}
                for (kind, target), each in self._kept.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = {
            (str(each["kind"]), str(each["target"])): SavedCall(
                json.loads(each["call"]), tuple(each["tensors"])
            )
            for each in state["kept"]
        }
        self._kept = kept if self.limit else {}


def recalled(
    call: Mapping[str, Any],
    module: nn.Module,
    device: torch.device,
    tensors: Sequence[torch.Tensor] | None = None,
) -> Invocation:
    """The call again, on a rank that need not have made it; without ``tensors`` room for the source's."""
    own = Invocation.told(call, treespec_loads(call["spec"]), Attention.now(), _meshes_of(module))
    if tensors is None:
        return own
    filled = replace(own.like(call, device), outputs=own.outputs)
    for room, kept in zip(filled.tensors(), tensors, strict=True):
        if kept.numel():
            flat(local_part(room)).copy_(flat(kept))
    return filled


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    local = local_part(tensor).detach()
    return local.clone() if local.is_cpu else local.cpu()


def _meshes_of(module: nn.Module) -> list[DeviceMesh]:
    """Those that a module's parameters lie on, and their axes."""
    meshes = dict.fromkeys(each.device_mesh for each in module.parameters() if isinstance(each, DTensor))
    axes = [mesh[name] for mesh in meshes for name in mesh.mesh_dim_names or () if mesh.ndim > 1]
    return [*meshes, *axes]
