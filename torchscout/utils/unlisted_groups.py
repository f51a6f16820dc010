"""Process groups that ``torch.distributed`` does not list, and the collectives on them.

[Note: not in PyTorch's lists] PyTorch counts the groups that a rank has created and has not destroyed, and
names later groups by these counts. SCOUT's groups are closed after a failure, which ranks notice at different
steps. If PyTorch listed them, counts would differ between ranks for a while, and the ranks of a group that
training creates in that time would look for each other under different names, and hang. So SCOUT's groups are
made of the same parts as those of ``dist.new_group``, but each under a prefix of the job's store that is used
only once. Dropping the last reference to a group closes its connections, and other members that wait for this
rank, or use the group later, fail at once.

Functions of ``torch.distributed`` do not accept such a group in all places; those of this module do, and they
accept any other group too. They raise ``RuntimeError``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchscout.utils._torch import backend_of, describe_group, name_group, register_backend, set_backend

__all__ = [
    "Store",
    "all_gather",
    "all_reduce_max",
    "broadcast",
    "create",
    "part_of",
    "receive",
    "send",
    "store_of_job",
]

Store = Any
"""A ``torch.distributed.Store``, which type checkers do not know."""


def store_of_job() -> Store:
    """Return the store of the default process group."""
    return _world().get_group_store()


def part_of(store: Store, prefix: str) -> Store:
    """Return the part of a store whose keys begin with ``prefix``."""
    return dist.PrefixStore(f"{prefix}/", store)  # type: ignore[attr-defined]


def create(
    store: Store,
    ranks: Sequence[int],
    timeout: datetime.timedelta,
    description: str,
    *,
    name: str,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Connect this rank to the other ``ranks``, which make the same call with the same unused ``name``.

    The group uses Gloo or, for tensors on a ``device``, the backend that training uses there. Raises
    ``RuntimeError`` if a rank does not connect within ``timeout``.
    """
    store = part_of(store, name)
    position, size = ranks.index(dist.get_rank()), len(ranks)
    group = dist.ProcessGroup(store, position, size)
    if device is None:
        backend: Any = dist.ProcessGroupGloo(store, position, size, timeout)
    else:
        backend = _on_device(store, ranks, timeout, name, device)
    kind = dist.Backend.backend_type_map[backend.name()]
    set_backend(group, kind)
    for each in _devices_of_gloo() if device is None else [device]:
        register_backend(group, each, kind, backend)
    name_group(group, name)
    describe_group(group, description)
    return group


def _devices_of_gloo() -> list[torch.device]:
    """The devices whose tensors Gloo accepts; those on an accelerator it copies through the host."""
    return [torch.device(each) for each in ("cpu", "cuda") if each == "cpu" or torch.cuda.is_available()]


def _on_device(
    store: Store, ranks: Sequence[int], timeout: datetime.timedelta, name: str, device: torch.device
) -> Any:
    of_training = backend_of(_world(), device)
    kind = type(getattr(of_training, "wrapped_pg", of_training))  # wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL
    options = kind.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(ranks), name
    return kind(store, ranks.index(dist.get_rank()), len(ranks), options)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "SCOUT is attached to an initialized job"
    return dist.group.WORLD


def all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    options = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = False
    _finish(group.allgather([list(outputs)], [tensor], options))


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    options.asyncOp = False
    _finish(group.allreduce([tensor], options))


def broadcast(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    source: int,
    timeout: datetime.timedelta | None = None,
) -> None:
    """Overwrite ``tensor`` with that of the member at position ``source``.

    ``timeout`` replaces that of the group.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif tensor.dtype.itemsize == 1:  # not every backend knows the float8 types
        tensor = tensor.view(torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = source, 0, False
    if timeout is not None:
        options.timeout = timeout
    _finish(group.broadcast([tensor], options))


def send(tensor: torch.Tensor, group: dist.ProcessGroup, *, to: int) -> None:
    _finish(group.send([tensor], to, 0))


def receive(tensor: torch.Tensor, group: dist.ProcessGroup, *, source: int) -> None:
    _finish(group.recv([tensor], source, 0))


def _finish(work: Any) -> None:
    if work is not None:  # some backends have waited already
        work.wait()
