"""Saves the calls that checks have replayed, to replay them without a training step (paper, section 8).

The source of a replay saves its call in host memory and with its checkpoints, so one peer has the last call
of each layer. After a failure, restarted workers replay them in a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

__all__ = ["SavedCall", "SavedCalls", "restored"]

Key = tuple[str, str]
"""A recipe's kind and its target."""


@dataclass(frozen=True, slots=True)
class SavedCall:
    """One call as plain data."""

    call: Mapping[str, Any]
    """Its description for peers, and the tree structure of its arguments."""
    copies: tuple[torch.Tensor, ...]
    """Of this rank's tensors, in host memory, in the order of ``Invocation.tensors``."""
    copied: torch.cuda.Event | None = None
    """On a CUDA device, what to wait for before they are read."""

    @classmethod
    def of(cls, invocation: Invocation) -> SavedCall:
        """Raise ``ReplayError`` if the call cannot be saved."""
        if invocation.attention.is_ring or invocation.buffers:
            raise ReplayError(
                "it was called in a context_parallel block, which a later process cannot restore"
            )
        call = invocation.describe()
        for place, leaf in enumerate(call["leaves"]):
            if "object" in leaf:
                raise ReplayError(f"argument {place} is {leaf['object']:.80}, which cannot be saved")
        try:
            spec = treespec_dumps(invocation.spec)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ReplayError(f"the structure of its arguments cannot be saved: {error}") from error
        own = [local_part(each).detach() for each in invocation.tensors()]
        device = next((each.device for each in own if each.is_cuda), None)
        if device is None:
            return cls({**call, "spec": spec}, tuple(each.to("cpu", copy=True) for each in own))
        # Nothing waits for the device, or for new pages: the allocator keeps pinned memory for later calls.
        copies = [torch.empty_like(each, device="cpu", pin_memory=True) for each in own]
        for copy, each in zip(copies, own, strict=True):
            copy.copy_(each, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        return cls({**call, "spec": spec}, tuple(copies), copied)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.copies)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The copies, once they are complete."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.copies


class SavedCalls:
    """The calls that this rank has saved; part of its checkpoints, with the methods of a stateful object."""

    def __init__(self) -> None:
        self.limit = 0
        """Bytes that may be saved; 0 saves nothing."""
        self._kept: dict[Key, SavedCall] = {}
        self.problems: dict[Key, str] = {}
        """Why the last call of a target could not be saved on this rank."""

    def of(self, key: Key) -> SavedCall | None:
        return self._kept.get(key)

    def keep(self, key: Key, invocation: Invocation) -> None:
        """Save this rank's call, which all peers have replayed."""
        if not self.limit:
            self.drop(key)
            return
        try:
            kept = SavedCall.of(invocation)
            total = kept.nbytes + sum(each.nbytes for other, each in self._kept.items() if other != key)
            if total > self.limit:
                raise ReplayError(f"saved calls would need {total} bytes, and {self.limit} are allowed")
        except ReplayError as error:
            self.drop(key)
            self.problems[key] = str(error)
            return
        self.problems.pop(key, None)
        self._kept[key] = kept  # at its old place, so that snapshots have the others where they were

    def drop(self, key: Key) -> None:
        """Delete the call of this target, of which another rank has a newer one."""
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


def restored(
    call: Mapping[str, Any],
    module: nn.Module,
    device: torch.device,
    tensors: Sequence[torch.Tensor] | None = None,
) -> Invocation:
    """Return a saved call on any rank; without ``tensors``, the source sends their values later."""
    own = Invocation.from_description(call, treespec_loads(call["spec"]), Attention.now(), _meshes_of(module))
    if tensors is None:
        return own
    filled = replace(own.like(call, device), outputs=own.outputs)
    for room, saved in zip(filled.tensors(), tensors, strict=True):
        if saved.numel():
            flat(local_part(room)).copy_(flat(saved))
    return filled


def _meshes_of(module: nn.Module) -> list[DeviceMesh]:
    """Return the meshes of a module's parameters, and the one-dimensional meshes of their axes."""
    meshes = dict.fromkeys(each.device_mesh for each in module.parameters() if isinstance(each, DTensor))
    axes = [mesh[name] for mesh in meshes for name in mesh.mesh_dim_names or () if mesh.ndim > 1]
    return [*meshes, *axes]
