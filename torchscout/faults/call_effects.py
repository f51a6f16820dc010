"""What a fault does to a collective that its rank issues: another one, none, or in another order (paper, 7).

The rank's own code goes on as if nothing were wrong. See ``tampering`` for how calls are come by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CHANGES", "CallEffect", "Change", "Issue", "Skip", "Swap", "done"]

CHANGES = ("dtype", "operation", "shape")


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective about to be issued."""

    operation: str
    group: dist.ProcessGroup
    arguments: tuple[Any, ...]
    go_on: Callable[..., Any]
    """Issues it with the arguments that it is given."""
    returns_tensors: bool
    """Or only the work."""


class CallEffect(ABC):
    """Something that happens to a collective."""

    @abstractmethod
    def replace(self, issue: Issue) -> Any:
        """What its caller gets instead; None to have it issued after the rank's next one."""


@dataclass(frozen=True, slots=True)
class Change(CallEffect):
    """Another element type, another operation or twice as many elements."""

    what: str

    def __post_init__(self) -> None:
        if self.what not in CHANGES:
            raise ValueError(f"a collective's {self.what!r} cannot change; there is {', '.join(CHANGES)}")

    def replace(self, issue: Issue) -> Any:
        if self.what == "operation":
            return _result(issue, _other_operation(issue).boxed())
        change = _doubled if self.what == "shape" else _retyped
        issued = issue.go_on(*tree_map_only(torch.Tensor, change, issue.arguments))
        return _result(issue, issued[-1] if isinstance(issued, tuple) else issued)


@dataclass(frozen=True, slots=True)
class Skip(CallEffect):
    """It is not issued at all."""

    def replace(self, issue: Issue) -> Any:
        return done(issue)


@dataclass(frozen=True, slots=True)
class Swap(CallEffect):
    """It is issued only after the next one is done."""

    def replace(self, issue: Issue) -> Any:  # noqa: ARG002  as it is
        return None


def done(issue: Issue) -> Any:
    """What a caller gets of a collective that is done."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    tensors = [leaf for leaf in tree_leaves(issue.arguments) if isinstance(leaf, torch.Tensor)]
    future.set_result(tensors[0] if tensors else None)
    return _result(issue, _create_work_from_future(future).boxed())


def _result(issue: Issue, work: Any) -> Any:
    """As the operator returns it: what was to be filled in, and the work."""
    return (issue.arguments[0], work) if issue.returns_tensors else work


def _other_operation(issue: Issue) -> dist.Work:
    given = next((leaf for leaf in tree_leaves(issue.arguments) if isinstance(leaf, torch.Tensor)), None)
    own = torch.ones(1, device="cpu") if given is None else given.detach().clone()
    work: dist.Work | None
    if issue.operation == "all_gather":
        work = dist.all_reduce(own, group=issue.group, async_op=True)
    else:
        into = [torch.empty_like(own) for _ in range(issue.group.size())]
        work = dist.all_gather(into, own, group=issue.group, async_op=True)
    assert work is not None, "this rank is in the group"
    return work


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten()] * 2)


def _retyped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32 if tensor.dtype == torch.float64 else torch.float64)
