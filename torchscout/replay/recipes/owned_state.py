"""Verifies that state which only one rank has does not change between two updates (paper, section 6.1.1).

An FSDP shard has no replica to compare it with, so its owner signs it right after an update and again right
before the next one. A difference is evidence against the owner and needs no vote. This is done in every step:
the next update starts from the changed state, so an unnoticed change would be certified.

[Note: writes of the program] A write that increments a tensor's version counter is legitimate; the tensor
then counts as not watched over that step. Some writes are not counted: ``parameter.data.clamp_()``, and
multi-tensor operations on DTensors. A fault changes the state of one rank once. So a change on several ranks
after the same step, or on one rank after several steps, is a write by the program: it is not reported, and
the tensor is not watched from then on.

Parameters that the next update overwrites are watched in the same way: see ``working_copies``.

Signatures on a device are read only in checks, so no other step waits for them. With a budget, each step
watches a part of the state, and the next step another part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import xxhash

from torchscout.c3.fold import signed
from torchscout.c3.signature import LastPlan
from torchscout.decision.types import Surface
from torchscout.errors import ReplayError, describe_error
from torchscout.mesh import LayerKind
from torchscout.replay.recipe import Comparison, Mode, Observation, Recipe, Replay
from torchscout.replay.recipes.rest_window import Pace, Window
from torchscout.replay.recipes.working_copies import CopyWatch
from torchscout.state.table import Row, row_of
from torchscout.utils.cuda_graphs import is_capturing
from torchscout.utils.reentrancy import in_own_work

__all__ = ["OWNED_STATE", "UNCHANGED", "OwnedStateRecipe"]

UNCHANGED = signed(xxhash.xxh3_64_intdigest(b"torchscout: what this rank holds has not changed"))
"""In place of a signature: all bytes are the same before this update as after the previous one."""
OWNED_STATE = "state/owned"
_UNREADABLE = (ReplayError, ValueError, RuntimeError)
_Rows = Mapping[Surface, Row]


class OwnedStateRecipe(Recipe):
    """All owned state and working copies, between the updates since the last check."""

    def __init__(
        self,
        state: Callable[[], _Rows],
        optimizers: Sequence[torch.optim.Optimizer],
        kind: str = "replicated_state",
        role: LayerKind = LayerKind.DENSE,
        *,
        budget: float | None = None,
        is_learned: Callable[[], bool] = lambda: True,
        copies: CopyWatch | None = None,
        padding: Callable[[], Mapping[Surface, Sequence[range]]] = dict,
    ) -> None:
        """``state`` returns what only this rank has, ``padding`` the elements of it that are not used;
        ``is_learned`` returns whether there is any state.

        ``budget`` is the share of a step's time that watching may take; None watches everything.
        """
        self._state, self._optimizers, self._budget = state, optimizers, budget
        self._is_learned, self._padding = is_learned, padding
        self.kind, self.role = kind, role
        self._hooks: list[Any] = []
        self._copies = copies or CopyWatch()
        self._step: int | None = None
        """The step of the last update; None while an update is in progress."""
        self._seen: set[Surface] = set()
        """Working copies that could be watched since that update."""
        self._open: list[Window] = []
        """One for owned state, and one for working copies if there are any."""
        self._closed: list[Window] = []
        """Windows closed since the last check."""
        self._problem: str | None = None
        """Why this rank could not watch since the last check."""
        self._missed = 0
        """Number of windows of owned state since the last check in which nothing could be watched."""
        self._pace = Pace()
        self._turn = 0
        self._plans = {False: LastPlan(), True: LastPlan()}
        """Of owned state, and of working copies."""
        self._written: set[Surface] = set()
        """State that the program writes to; see [Note: writes of the program]."""
        self.share = 1.0
        """The share of bytes that were watched in the steps up to the last check."""
        self.changed: list[tuple[int, Surface]] = []
        """Changes that the last check found: the step of the update before each, and the surface."""

    def watched_state(self) -> Mapping[Surface, torch.Tensor]:
        """Return what is watched, regardless of the budget."""
        return {**self._copies.resting(), **{name: row.tensor for name, row in self._state().items()}}

    def state(self) -> _Rows:
        """Return what only this rank has, without padding."""
        padding, found = self._padding(), dict[Surface, Row]()
        for name, row in self._state().items():
            # What an optimizer keeps for each element is named after the state.
            unused = padding.get(name) or padding.get(name.rpartition(".")[0]) or ()
            if not unused or row.local.numel() < unused[-1].stop:
                found[name] = row
                continue
            flat, begins = row.local.detach().view(-1), [0, *(each.stop for each in unused)]
            ends = [*(each.start for each in unused), flat.numel()]
            pieces = {f"{name}[{a}:{b}]": flat[a:b] for a, b in zip(begins, ends, strict=True) if a < b}
            found |= {each: row_of(each, piece) for each, piece in pieces.items()}
        return found

    def unwatched(self) -> Mapping[Surface, str]:
        """Return the working copies that are not watched, with the reasons."""
        return self._copies.unwatched()

    def start(self) -> None:
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._close_windows()))
        for module in self._copies.passes if self._copies.are_late else ():
            self._hooks.append(module.register_forward_hook(lambda *_: self._pass_ended()))

    def close(self) -> None:
        self._open.clear()
        self._closed.clear()
        self._copies.close()
        while self._hooks:
            self._hooks.pop().remove()

    def update_begins(self) -> None:
        """Called before the outermost update, which may free working copies before optimizers step."""
        self._close_windows(copies_only=True)

    def update_ended(self) -> None:
        """Called after the update. If it was skipped (infinite gradients), state must not have changed."""
        self._close_windows()

    def watch_after(self, step: int) -> None:
        """Called after the update of this step: watch state until the next update begins."""
        self._pace.step_ended()
        begin, self._open, self._step = time.perf_counter(), [], step
        owned = self._read(self._state, are_copies=False)
        copies = self._read(self._resting, are_copies=True) or {}
        copies = {name: row for name, row in copies.items() if name not in (owned or {})}
        every = {**copies, **(owned or {})}
        due = self._due({name: row for name, row in every.items() if name not in self._written})
        if owned is not None:
            self._open_window(step, owned, due, are_copies=False)
        if copies:
            self._open_window(step, copies, due, are_copies=True)
        opened = {name: each for window in self._open for name, each in window.tensors.items()}
        self._copies.begin(opened if copies else {})
        self._seen = {*copies}
        self._pace.signed(sum(row.bytes for row in due.values()), time.perf_counter() - begin)

    def new_replay(self, *_: object) -> _OwnedStateReplay:
        return _OwnedStateReplay(self)

    @property
    def is_learned(self) -> bool:
        return self._is_learned()

    def changes(self) -> list[tuple[int, Surface]]:
        """Return what has changed since the last check, except for what a collective may have written to.

        Raise ``ReplayError`` if nothing was watched.
        """
        if all(each.are_copies for each in self._closed):
            self.share = 0.0
            raise ReplayError(self._problem or "the optimizer did not step")
        found = []
        for window in self._closed:
            changed = window.changed()
            received = window.received.intersection(changed)
            self._copies.excuse(window, window.written | received)
            found += [(window.step, name) for name in changed if name not in received]
        return found

    def leave_out(self, changes: Collection[tuple[int, Surface]]) -> None:
        """Treat these changes as writes of the program."""
        names = {name for _, name in changes}
        for window in self._closed:
            if window.are_copies:
                self._copies.excuse(window, {name for step, name in changes if step == window.step})
            else:
                window.written |= names
                self._written.update(names & window.sizes.keys())

    def conclude(self, changed: Sequence[tuple[int, Surface]]) -> None:
        """Called when a check has examined all windows."""
        demanded = sum(each.demanded for each in self._closed)
        watched = sum(each.watched for each in self._closed)
        closed = sum(not each.are_copies for each in self._closed)
        reached = closed / (closed + self._missed) if closed else 0.0
        self.share = reached * (watched / demanded if demanded else 1.0)
        self.changed = list(changed)

    def forget(self) -> None:
        """Called when the check is over."""
        self._closed.clear()
        self._copies.checked()
        self._problem, self._missed = None, 0

    def _due(self, every: dict[Surface, Row]) -> dict[Surface, Row]:
        """Return as much as the budget allows, starting where the previous step ended."""
        allowed = self._pace.bytes_within(self._budget)
        if allowed is None or allowed >= sum(row.bytes for row in every.values()):
            return every
        names, chosen, taken = list(every), dict[Surface, Row](), 0
        while not chosen or (taken < allowed and len(chosen) < len(names)):
            name = names[self._turn % len(names)]
            chosen[name], taken = every[name], taken + every[name].bytes
            self._turn += 1
        return chosen

    def _resting(self) -> _Rows:
        return {name: row_of(name, each) for name, each in self._copies.resting().items()}

    def _read(self, state: Callable[[], _Rows], *, are_copies: bool) -> _Rows | None:
        try:
            return state()
        except _UNREADABLE as error:
            self._failed((), error, are_copies=are_copies)
            return None

    def _open_window(self, step: int, every: _Rows, due: Collection[Surface], *, are_copies: bool) -> None:
        rows = {name: row for name, row in every.items() if name in due}
        total = sum(row.bytes for row in every.values())
        try:
            plan = self._plans[are_copies].of(row.local for row in rows.values())
            self._open.append(Window(step, rows, plan, total, are_copies=are_copies))
        except _UNREADABLE as error:
            self._failed(rows, error, are_copies=are_copies)

    def _pass_ended(self) -> None:
        """Watch working copies that the forward pass has gathered."""
        if self._step is None or in_own_work() or is_capturing():
            return
        found = self._read(self._resting, are_copies=True) or {}
        late = {name: row for name, row in found.items() if name not in self._seen}
        if not late:
            return
        self._seen.update(late)
        begun = len(self._open)
        self._open_window(self._step, late, self._due(late), are_copies=True)
        for window in self._open[begun:]:
            self._copies.begin_late(window.tensors)

    def _close_windows(self, *, copies_only: bool = False) -> None:
        """Called when an update begins. Only the first call in a step closes anything."""
        if in_own_work() or is_capturing():
            return
        self._step = None
        closing = [each for each in self._open if each.are_copies or not copies_only]
        self._open = [each for each in self._open if copies_only and not each.are_copies]
        for window in closing:
            names = list(window.sizes)
            try:
                window.close(self._copies.received)
                self._closed.append(window)
            except _UNREADABLE as error:
                self._failed(names, error, are_copies=window.are_copies)

    def _failed(self, names: Collection[Surface], error: Exception, *, are_copies: bool) -> None:
        if are_copies:
            self._copies.not_read(names, describe_error(error))
        else:
            self._problem, self._missed = describe_error(error), self._missed + 1


class _OwnedStateReplay(Replay):
    """All windows since the last check."""

    def __init__(self, recipe: OwnedStateRecipe) -> None:
        self._recipe = recipe
        self._changed: list[tuple[int, Surface]] = []
        self._is_watched = True
        """Whether any peer has owned state."""

    def describe(self) -> Any:
        if not self._recipe.is_learned:
            return {"watches": False, "changed": []}
        self._changed = self._recipe.changes()
        return {"watches": True, "changed": sorted({step for step, _ in self._changed})}

    def prepare(self, descriptions: Sequence[Any], _: int, /) -> None:
        self._is_watched = any(each["watches"] for each in descriptions)
        peers = Counter(step for each in descriptions for step in each["changed"])
        often = Counter(name for _, name in self._changed)
        written = {name for step, name in self._changed if peers[step] > 1 or often[name] > 1}
        self._recipe.leave_out([(step, name) for step, name in self._changed if name in written])
        self._changed = [(step, name) for step, name in self._changed if name not in written]
        self._recipe.conclude(self._changed)

    def comparisons(self) -> list[Comparison]:
        return [Comparison(OWNED_STATE, Mode.STATE, expected=UNCHANGED)] if self._is_watched else []

    def observe(self, seen: Observation) -> None:
        words = "\n".join(f"{step} {name}" for step, name in self._changed)
        wrong = signed(xxhash.xxh3_64_intdigest(words.encode()))
        seen.signatures[OWNED_STATE] = wrong if self._changed else UNCHANGED

    def settle(self) -> None:
        self._recipe.forget()

    def release(self) -> None:
        self._changed = []
