"""Initializes and resets what FSDP2 records about the current iteration.

Every private attribute of FSDP that SCOUT needs is used in this module only. PyTorch 2.13 has a public reset;
for 2.10 to 2.12 this module does the same with the attributes that those versions have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchscout.errors import ReplayError

__all__ = ["gathered_dtype", "initialize", "missing", "reset", "without_prefetch"]

_PREFETCH = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")

_OF_STATE = (
    "_state_ctx.all_states",
    "_state_ctx.iter_forward_root",
    "_state_ctx.post_backward_final_callback_queued",
    "_comm_ctx",
    "_device_handle.current_stream",
    "_modules_to_run_forward",
    "_training_state",
)
_OF_GROUP = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_forward_indices",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_to_sharded",
    "_training_state",
    "_wait_all_gather_streams_on_event",
)


def initialize(root: FSDPModule) -> None:
    """Let FSDP determine which module is the root, as it does in the first pass over the whole model.

    A module inside the root that is called before that would become a root itself. Later calls do nothing.
    Raises ``ReplayError`` where this PyTorch has no such function.
    """
    state = _state_of(root)
    if not hasattr(state, "_lazy_init"):
        raise ReplayError("this PyTorch's FSDP cannot be prepared before the first training step")
    state._lazy_init()


def gathered_dtype(module: object) -> torch.dtype | None:
    """Return the dtype in which FSDP gathers the parameters of this module; None if it keeps theirs."""
    policy = getattr(_state_of(module), "_mp_policy", None) if isinstance(module, FSDPModule) else None
    return getattr(policy, "param_dtype", None)


def missing(root: FSDPModule) -> str | None:
    """Return the first attribute of FSDP that this module needs and this PyTorch does not have, or None."""
    state = _state_of(root)
    if hasattr(root, "reset_iter_state"):
        wanted = [(state, path) for path in _PREFETCH]
    else:
        wanted = [(state, path) for path in (*_PREFETCH, *_OF_STATE)]
        wanted += [(group, path) for group in _groups_of(state) for path in _OF_GROUP]
    absent = (f"{type(owner).__name__}.{path}" for owner, path in wanted if not _has(owner, path))
    return next(absent, None)


def reset(root: FSDPModule) -> None:
    """Forget a pass that failed, or that called only some of the modules that are sharded together.

    Without it, the next pass of training would be taken for a continuation of that one: its parameters would
    not be gathered in order, and its gradients would not be reduced. All parameters become shards again.
    Gradients that are being reduced are lost, so it may only be called right after an update.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_without_public_call(_state_of(root))


@contextmanager
def without_prefetch(modules: Iterable[object]) -> Iterator[None]:
    """In this block, passes of these modules gather no other module's parameters in advance.

    That is a collective in the middle of a pass, and a rank whose pass fails before it would not take part.
    """
    with ExitStack() as restored:
        for state in [_state_of(each) for each in modules if isinstance(each, FSDPModule)]:
            for name in _PREFETCH:
                restored.callback(setattr, state, name, getattr(state, name))
                setattr(state, name, [])
        yield


def _reset_without_public_call(root: Any) -> None:
    """What ``FSDPModule.reset_iter_state`` of PyTorch 2.13 does."""
    stream, communication = root._device_handle.current_stream(), root._comm_ctx
    for kept in _collectives_of(communication):
        if kept.event is not None:
            stream.wait_event(kept.event)
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    if hasattr(communication, "post_forward_order"):
        communication.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            _reset_group(group, stream)
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    if (gathered := group._all_gather_result) is not None:
        if gathered.all_gather_event is not None:
            stream.wait_event(gathered.all_gather_event)
        if hasattr(gathered.all_gather_work, "wait"):
            gathered.all_gather_work.wait()
    if group._post_reduce_event is not None:
        stream.wait_event(group._post_reduce_event)
    if group._all_reduce_state is not None and group._all_reduce_state.event is not None:
        stream.wait_event(group._all_reduce_state.event)
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def _collectives_of(communication: Any) -> list[Any]:
    """Results of collectives that are kept until the device has used them. None before the first pass."""
    single = (getattr(communication, name, None) for name in ("all_gather_state", "reduce_scatter_state"))
    return [*filter(None, single), *getattr(communication, "reduce_scatter_states", ())]


def _groups_of(state: Any) -> Iterator[Any]:
    """A state has one group of parameters, and from PyTorch 2.12 on any number of them."""
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif getattr(state, "_fsdp_param_group", None) is not None:
        yield state._fsdp_param_group


def _state_of(root: FSDPModule) -> Any:
    return fully_shard.state(root)  # type: ignore[attr-defined]


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
