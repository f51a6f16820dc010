"""State that one rank alone holds must not change between two updates (paper, section 6.1.1).

Nobody has a second copy of an FSDP shard, so that its owner watches it: signed right after an update, and
again right before the next one. That is the owner's own evidence and needs no vote. A write that PyTorch
knows of is legitimate, and then nothing was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.record import Surface
from torchscout.decision.signature import PendingSignatures
from torchscout.errors import ReplayError, told
from torchscout.evidence.replay.alignment import Broadcast
from torchscout.evidence.replay.optimizer_slice import local_of
from torchscout.evidence.replay.recipe import Comparison, Given, Mode, Observation
from torchscout.mesh import Role

__all__ = ["AT_REST", "UNCHANGED", "AtRestRecipe"]

UNCHANGED = signed(xxhash.xxh3_64_intdigest(b"torchscout: what this rank holds has not changed"))
"""In place of a signature: the same bytes before the update as after the one before."""
AT_REST = "state/at_rest"
_State = Callable[[], Mapping[Surface, torch.Tensor]]


class AtRestRecipe:
    """All owned state, over the step at whose end it is due."""

    targets = ("",)
    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = False
    vouches = True

    def __init__(
        self,
        state: _State,
        optimizers: Sequence[torch.optim.Optimizer],
        kind: str = "census",
        role: Role = Role.DENSE,
    ) -> None:
        self._state, self._optimizers = state, optimizers
        self.kind, self.role = kind, role

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _AtRest:  # noqa: ARG002  nothing is broadcast
        return _AtRest(self._state, self._optimizers)

    def again(self, target: int, given: Given) -> _AtRest:  # noqa: ARG002  as the protocol has it
        raise ReplayError("what rests is watched over a training step")


class _AtRest:
    """One step: from its beginning, which is the end of the one before, to its update."""

    def __init__(self, state: _State, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._tensors = {name: local_of(tensor, tensor) for name, tensor in state().items()}
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        self._before: PendingSignatures | None = PendingSignatures(self._tensors.values())
        self._after: PendingSignatures | None = None
        self._problem: str | None = "the optimizer did not step"
        self._hooks = [optimizers[0].register_step_pre_hook(self._look_again)]

    def describe(self) -> Any:
        self._unhook()
        return None

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:  # noqa: ARG002  nothing is sent
        if self._problem is not None:
            raise ReplayError(self._problem)

    def align(self, broadcast: Broadcast) -> None:
        """Every rank looks at its own."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", ()

    def comparisons(self) -> list[Comparison]:
        return [Comparison(AT_REST, Mode.STATE, right=UNCHANGED)]

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        assert self._before is not None, "watched first"
        assert self._after is not None, "prepared first"
        names, before = list(self._tensors), list[int]()

        def hold_against(after: list[int]) -> None:
            changed = [name for name, old, new in zip(names, before, after, strict=True) if old != new]
            wrong = signed(xxhash.xxh3_64_intdigest("\n".join(changed).encode()))
            seen.signatures[AT_REST] = wrong if changed else UNCHANGED

        seen.when_signed(self._before, before.extend)
        seen.when_signed(self._after, hold_against)

    def invocation(self) -> None:
        """State is no call."""

    def release(self) -> None:
        self._unhook()
        self._tensors, self._versions = {}, {}
        self._before = self._after = None

    def _look_again(self, *_: Any) -> None:
        if self._after is not None:
            return  # the first update of the step is the first that writes
        try:
            self._after = PendingSignatures(self._tensors.values())
        except (ValueError, RuntimeError) as error:  # training must not notice
            self._problem = told(error)
            return
        written = [name for name, tensor in self._tensors.items() if tensor._version != self._versions[name]]
        self._problem = f"{written[0]} was written to between updates" if written else None

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
