"""State that one rank alone holds must not change between two updates (paper, section 6.1.1).

Nobody has a second copy of an FSDP shard, so that its owner watches it: signed right after an update, and
again right before the next one. That is the owner's own evidence and needs no vote. It is done at every step:
the next update builds on whatever the state is by then, so that a change nobody noticed would be certified.

[Note: writes of the program] A write that PyTorch counts as one is legitimate; what was written was not
watched over that step. Not all are counted: ``parameter.data.clamp_()`` is not, nor are multi-tensor
operations on DTensors. A fault changes the state of one rank once. What changes on several ranks after the
same step, or on one rank after several, is therefore written by the program: no incident is reported, and
the tensor is not watched from then on.

Signatures on a device are read only at the end of a step with a check: nothing waits for them in between.
With a budget, a part of the state is watched in each step, another one in the next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.record import Surface
from torchscout.decision.signature import PendingSignatures, read_signatures
from torchscout.errors import ReplayError, told
from torchscout.evidence.hearing import is_inert
from torchscout.evidence.replay.alignment import Broadcast
from torchscout.evidence.replay.optimizer_slice import local_of
from torchscout.evidence.replay.recipe import Comparison, Given, Mode, Observation
from torchscout.mesh import Role

__all__ = ["AT_REST", "UNCHANGED", "AtRestRecipe"]

UNCHANGED = signed(xxhash.xxh3_64_intdigest(b"torchscout: what this rank holds has not changed"))
"""In place of a signature: the same bytes before the update as after the one before."""
AT_REST = "state/at_rest"
_BYTES_PER_SECOND = 1e12
"""How fast an accelerator signs, at least; its time is not measured, so that nothing waits for it."""
_State = Callable[[], Mapping[Surface, torch.Tensor]]


@dataclass
class _Window:
    """The time from one update to the next."""

    step: int
    """The step whose update came before."""
    tensors: dict[Surface, torch.Tensor]
    """What is watched; let go of when the window closes."""
    wholes: dict[Surface, torch.Tensor]
    """The DTensors that these are parts of, or the same again: writes to them are counted apart."""
    before: PendingSignatures
    held: int
    """Bytes of all that is to be watched, in this window or another."""
    sizes: Mapping[Surface, int] = field(default_factory=dict)
    """In bytes, of all that was looked at."""
    after: PendingSignatures | None = None
    written: frozenset[Surface] = frozenset()
    """What PyTorch knows to have been written to."""

    def __post_init__(self) -> None:
        self._versions = self._counted()

    def close(self) -> None:
        """The next update begins."""
        self.after = PendingSignatures(self.tensors.values())
        counted = zip(self.tensors, self._versions, self._counted(), strict=True)
        self.written = frozenset(name for name, before, now in counted if before != now)
        self.sizes = {name: _size(each) for name, each in self.tensors.items()}
        self.tensors, self.wholes = {}, {}

    @property
    def watched(self) -> int:
        """Bytes of what was watched, once the window is closed."""
        return sum(size for name, size in self.sizes.items() if name not in self.written)

    def changed(self) -> list[Surface]:
        """Once it is closed."""
        assert self.after is not None, "only closed windows are looked at"
        before, after = read_signatures([self.before, self.after])
        found = zip(self.sizes, before, after, strict=True)
        return [name for name, old, new in found if old != new and name not in self.written]

    def _counted(self) -> list[tuple[int, int]]:
        return [(each._version, self.wholes[name]._version) for name, each in self.tensors.items()]


class AtRestRecipe:
    """All owned state, in the time between updates, since the last check."""

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
        *,
        budget: float | None = None,
        is_learned: Callable[[], bool] = lambda: True,
    ) -> None:
        """``state`` is what to watch now; ``is_learned`` whether there is anything.

        ``budget`` is the share of a step's time that watching may take; None watches everything.
        """
        self._state, self._optimizers, self._budget = state, optimizers, budget
        self._is_learned = is_learned
        self.kind, self.role = kind, role
        self._hooks: list[Any] = []
        self._open: _Window | None = None
        self._closed: list[_Window] = []
        """Those since the last check."""
        self._problem: str | None = None
        """What kept this rank from watching since the last check."""
        self._missed = 0
        """Windows since the last check in which nothing could be watched."""
        self._pace = _Pace()
        self._turn = 0
        self._restless: set[Surface] = set()
        """What the program writes to; see [Note: writes of the program]."""
        self.share = 1.0
        """Of the owned bytes, over the steps up to the last check, those that were watched."""
        self.changed: list[tuple[int, Surface]] = []
        """After which step what has changed, as far as the last check found."""

    def held(self) -> Mapping[Surface, torch.Tensor]:
        """What is watched, or would be if the budget allowed it."""
        return self._state()

    def start(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._close_window()))

    def close(self) -> None:
        self._open = None
        self._closed.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def update_ended(self) -> None:
        """If it was skipped (a gradient was not finite), all must still be as it was after the one before."""
        self._close_window()

    def rest(self, step: int) -> None:
        """The update of this step is over: what is owned must stay as it is until the next one begins."""
        self._pace.step_ended()
        begin, self._open = time.perf_counter(), None
        try:
            wholes = self._state()
            every = {name: local_of(tensor, tensor) for name, tensor in wholes.items()}
            tensors = self._due({name: each for name, each in every.items() if name not in self._restless})
            before = PendingSignatures(tensors.values())
        except (ReplayError, ValueError, RuntimeError) as error:
            self._problem, self._missed = told(error), self._missed + 1
            return
        held = sum(map(_size, every.values()))
        self._open = _Window(step, tensors, {name: wholes[name] for name in tensors}, before, held)
        self._pace.signed(sum(map(_size, tensors.values())), time.perf_counter() - begin)

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _AtRest:  # noqa: ARG002  nothing is broadcast
        return _AtRest(self)

    def again(self, target: int, given: Given) -> _AtRest:  # noqa: ARG002  as the protocol has it
        raise ReplayError("what rests is watched over a training step")

    @property
    def is_learned(self) -> bool:
        return self._is_learned()

    def windows(self) -> list[_Window]:
        """Those since the last check; a ``ReplayError`` if nothing was watched in any of them."""
        if not self._closed:
            self.share = 0.0
            raise ReplayError(self._problem or "the optimizer did not step")
        return list(self._closed)

    def leave_out(self, names: Collection[Surface]) -> None:
        """The program writes to these."""
        for window in self._closed:
            window.written |= frozenset(names)
        self._restless.update(names)

    def conclude(self, changed: Sequence[tuple[int, Surface]]) -> None:
        """A check has looked at all windows so far."""
        held = sum(each.held for each in self._closed)
        watched = sum(each.watched for each in self._closed)
        reached = len(self._closed) / (len(self._closed) + self._missed) if self._closed else 0.0
        self.share = reached * (watched / held if held else 1.0)
        self.changed = list(changed)

    def forget(self) -> None:
        """The check is over."""
        self._closed.clear()
        self._problem, self._missed = None, 0

    def _due(self, every: dict[Surface, torch.Tensor]) -> dict[Surface, torch.Tensor]:
        """As much as the budget allows, beginning where the step before has ended."""
        total = sum(map(_size, every.values()))
        allowed = self._pace.bytes_within(self._budget)
        if allowed is None or allowed >= total:
            return every
        names, chosen, taken = list(every), dict[Surface, torch.Tensor](), 0
        while not chosen or (taken < allowed and len(chosen) < len(names)):
            name = names[self._turn % len(names)]
            chosen[name], taken = every[name], taken + _size(every[name])
            self._turn += 1
        return chosen

    def _close_window(self) -> None:
        """An update begins; the first one of a step is the first that writes."""
        window, self._open = self._open, None
        if window is None or is_inert():
            return
        try:
            window.close()
        except (ValueError, RuntimeError) as error:  # training must not notice
            self._problem, self._missed = told(error), self._missed + 1
            return
        self._closed.append(window)


class _Pace:
    """What signing and steps take, as far as the host can tell."""

    def __init__(self) -> None:
        self._seconds_per_byte: float | None = None
        self._step_seconds: float | None = None
        self._ended: float | None = None

    def step_ended(self) -> None:
        now = time.perf_counter()
        if self._ended is not None:
            self._step_seconds = _mixed(self._step_seconds, now - self._ended)
        self._ended = now

    def signed(self, size: int, seconds: float) -> None:
        if size:
            pace = seconds / size + 1 / _BYTES_PER_SECOND
            self._seconds_per_byte = _mixed(self._seconds_per_byte, pace)

    def bytes_within(self, budget: float | None) -> int | None:
        """How much may be signed twice in a step; None if that is not limited, or not known yet."""
        if budget is None or self._seconds_per_byte is None or self._step_seconds is None:
            return None
        return int(budget * self._step_seconds / self._seconds_per_byte / 2)


class _AtRest:
    """All windows since the last check."""

    def __init__(self, recipe: AtRestRecipe) -> None:
        self._recipe = recipe
        self._changed: list[tuple[int, Surface]] = []
        """After which step what has changed."""
        self._is_watched = True
        """Whether any peer has something to watch."""

    def describe(self) -> Any:
        if not self._recipe.is_learned:
            return {"watches": False, "changed": []}
        windows = self._recipe.windows()
        self._changed = [(each.step, name) for each in windows for name in each.changed()]
        return {"watches": True, "changed": sorted({step for step, _ in self._changed})}

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:  # noqa: ARG002  nothing is sent
        self._is_watched = any(each["watches"] for each in descriptions)
        peers = Counter(step for each in descriptions for step in each["changed"])
        often = Counter(name for _, name in self._changed)
        written = {name for step, name in self._changed if peers[step] > 1 or often[name] > 1}
        self._recipe.leave_out(written)
        self._changed = [(step, name) for step, name in self._changed if name not in written]
        self._recipe.conclude(self._changed)

    def align(self, broadcast: Broadcast) -> None:
        """Every rank looks at its own."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", ()

    def comparisons(self) -> list[Comparison]:
        return [Comparison(AT_REST, Mode.STATE, right=UNCHANGED)] if self._is_watched else []

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        words = "\n".join(f"{step} {name}" for step, name in self._changed)
        wrong = signed(xxhash.xxh3_64_intdigest(words.encode()))
        seen.signatures[AT_REST] = wrong if self._changed else UNCHANGED

    def invocation(self) -> None:
        """State is no call."""

    def release(self) -> None:
        self._changed = []
        self._recipe.forget()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
