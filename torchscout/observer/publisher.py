"""Publishes a trainer's progress: layers, optimizer, input, checkpoints, collectives (paper, section 7).

An operation that may block is published before it begins. Everything uses PyTorch's public hooks and the
interceptor of collectives; ``phase_hooks`` marks what has no hooks. A collective is published as its
fingerprint: what healthy callers have in common, as text and as 64 bits. Backends compare numbers of
elements, so shapes are left out. Values that may differ are left out as well: the splits of an all-to-all
have a compatibility rule of their own, and the root of a scatter has inputs that other members do not have.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import xxhash

from torchscout.collectives.call import POINT_TO_POINT, Call, Group
from torchscout.collectives.interceptor import Pending
from torchscout.decision.progress import CommGroup, Phase
from torchscout.observer.device import DeviceProgress, Track
from torchscout.observer.record.writer import NOWHERE, ProgressWriter
from torchscout.utils._torch import backend_of, tree_leaves
from torchscout.utils.reentrancy import in_backward, in_own_work

__all__ = ["Fingerprint", "Publisher", "WatchedInput", "line_of", "read"]

_BY_OUTPUT = frozenset({"all_gather", "scatter", "recv"})
"""Operations whose outputs must have equal sizes; of all others it is the inputs. The output of an all-gather
and the input of a reduce-scatter are whole, while a rank's own part may be uneven."""
_WITHOUT_SIZE = frozenset({"all_to_all", "barrier"})
_MAX_PHRASES = 4096


class Fingerprint(NamedTuple):
    """What all callers of a collective must have in common; equal fingerprints share one phrase."""

    operation: str
    dtype: Hashable
    sizes: tuple[int, ...]
    """The number of elements of each tensor."""
    reduction: str | None
    root: int | None

    @property
    def text(self) -> str:
        """For people: ``all_reduce float32[1024] sum``, ``broadcast int64[2] root 0``."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        sizes = " ".join(f"[{size}]" for size in self.sizes)
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(filter(None, (self.operation, dtype + sizes, self.reduction, root)))

    @property
    def number(self) -> int:
        return xxhash.xxh3_64_intdigest(self.text.encode())


def read(call: Call) -> Fingerprint:
    """Return the fingerprint of a call; both ends of a transfer have the same."""
    operation = call.operation
    if operation in _WITHOUT_SIZE:
        return Fingerprint(operation, call.dtype, (), None, None)
    given = call.output_shapes if operation in _BY_OUTPUT else call.input_shapes
    sizes = tuple([math.prod(shape) for shape in given])
    if operation in POINT_TO_POINT:
        return Fingerprint("transfer", call.dtype, sizes, None, None)
    return Fingerprint(operation, call.dtype, sizes, call.reduction, call.root)


def line_of(call: Call) -> CommGroup | None:
    """Return the line that the call is counted on; None for a receive from any source."""
    group = call.group
    members = group.members or ()
    if call.operation not in POINT_TO_POINT:
        return CommGroup(_key(call), members, _name(group), timeout=_timeout(call))
    if call.peer is None or not members:
        return None
    places = (group.rank, call.peer) if call.operation == "send" else (call.peer, group.rank)
    source, destination = (members[place] for place in places)
    key = f"{_key(call)}/{source}>{destination}#{call.tag}"
    return CommGroup(
        key, (source, destination), f"{source} -> {destination}", pair=True, timeout=_timeout(call)
    )


def _timeout(call: Call) -> float | None:
    """Return the seconds after which the library ends the trainer; None for SCOUT's own groups."""
    if call.group.is_scouts or call.device is None:
        return None
    try:
        options = backend_of(call.process_group, call.device).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options, or of another device
        return None


def _key(call: Call) -> str:
    """Return a key that is unique in the job. The group's name is not: a group elsewhere may have the same,
    and a group may have one backend for the host and one for devices, which are counted separately."""
    group, device = call.group, call.device
    members = ",".join(map(str, group.members or ()))
    where = "" if device is None or device.type == "cpu" else f"/{device.type}"
    return f"{group.name}@{xxhash.xxh3_64_hexdigest(members.encode())[:8]}{where}"


def _name(group: Group) -> str:
    described = group.description not in ("", "undefined")
    return group.description if described else f"group {group.name}"


_Batch = TypeVar("_Batch")


class _OpenPhases(threading.local):
    """The phases that this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.open: list[Phase] = []


class Publisher:
    """Writes a trainer's progress record. It is a listener of collectives."""

    def __init__(self, writer: ProgressWriter) -> None:
        self._writer = writer
        self._lines: dict[tuple[Any, ...], tuple[int, Track | None]] = {}
        self._phrases: dict[Fingerprint, int] = {}
        self._had_backward = False
        """Whether there was a backward pass in this step."""
        self._device: DeviceProgress | None = None
        self._stepping: DeviceProgress | None = None
        """Of the device whose finished steps are published."""
        self._phases = _OpenPhases()
        self._thread = threading.get_ident()
        """The thread that trains: it attached, and then the one of the last update."""
        self._undo: list[Callable[[], None]] = []

    def before(self, call: Call) -> tuple[int, int] | None:
        """Publish that a collective is about to be entered; SCOUT's own too: a rank may hang in a check."""
        published = None
        try:
            published = self._publish(call)
        finally:
            if published is None:  # the interceptor does not call a listener again that has raised
                self._writer.misses_operations()
        return published

    def _publish(self, call: Call) -> tuple[int, int]:
        """Return the index of the group, and the number of the operation."""
        group, device = call.group, call.device
        where = None if device is None else device.type
        key = (group, where, call.operation, call.peer, call.tag) if call.tag is not None else (group, where)
        known = self._lines.get(key)
        if known is None:
            known = self._lines[key] = self._declare(call, device)
        line, track = known
        shared = read(call)
        phrase = self._phrases.get(shared)
        if phrase is None:
            phrase = self._writer.phrase(shared.text, shared.number)
            if len(self._phrases) < _MAX_PHRASES:  # sizes that never repeat must not fill the memory
                self._phrases[shared] = phrase
        sent, received = call.splits or (None, None)
        number = self._writer.issue(line, phrase, sent, received)
        if track is not None and self._device is not None:
            self._device.record(track, number)
        return line, number

    def refused(self, token: tuple[int, int] | None) -> None:
        """Take back what was published: the library has raised, and no peer will wait for it."""
        if token is not None:
            self._writer.take_back(*token)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Part of the listener protocol; that the backend has the operation says nothing about peers."""

    def _declare(self, call: Call, device: torch.device | None) -> tuple[int, Track | None]:
        """Return the line of a call, and the device's track on it if the device enters its operations."""
        line = line_of(call)
        index = NOWHERE if line is None else self._writer.declare(line)
        if index == NOWHERE or device is None or device.type != "cuda":
            return index, None
        # With NCCL the device runs the operation. Gloo runs all of its own on the host.
        is_on_device = "nccl" in call.process_group._get_backend(device).name()
        return index, self._progress_of(device).track(index) if is_on_device else None

    def _progress_of(self, device: torch.device) -> DeviceProgress:
        if self._device is None:
            self._device = DeviceProgress(self._writer, device)
            self._undo.append(self._device.close)
        return self._device

    def watch_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        """Publish a coordinate whenever the forward or backward pass of a layer begins."""
        writer = self._writer

        def before_backward(_: torch.Tensor) -> None:
            self._had_backward = True
            writer.advance(Phase.BACKWARD)

        def before_forward(_: torch.nn.Module, __: Any) -> None:
            # ``is_compiling`` is a constant to Dynamo, so the rest is not traced into the user's graph.
            if not torch.compiler.is_compiling() and not in_own_work():
                writer.advance(Phase.FORWARD)

        def after_forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or in_own_work():
                return
            # A hook on the tensor, not on the module, which would add a node to the user's graph and forbid
            # in-place changes of the output.
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(before_backward)  # type: ignore[no-untyped-call]
                    break

        for layer in layers:
            self._undo.append(layer.register_forward_pre_hook(before_forward).remove)
            self._undo.append(layer.register_forward_hook(after_forward).remove)

    def watch_steps(self, layer: torch.nn.Module, finished: Callable[[], None]) -> None:
        """Without an optimizer, a step ends when its first layer runs forward again after a backward pass.

        ``finished`` is called then, and must call ``step_finished``.
        """

        def before_forward(_: torch.nn.Module, __: Any) -> None:
            if not torch.compiler.is_compiling() and self._had_backward and not in_backward():
                self._had_backward = False
                finished()

        # Prepended, because this forward pass belongs to the next step.
        self._undo.append(layer.register_forward_pre_hook(before_forward, prepend=True).remove)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
        """Publish the optimizer's updates and count the steps; see ``watch_device``."""
        self.watch_device(device)
        hooks = (
            optimizer.register_step_pre_hook(lambda *_: self.update_begins()),
            optimizer.register_step_post_hook(lambda *_: self.step_finished(self._writer.step + 1)),
        )
        self._undo.extend(hook.remove for hook in hooks)

    def watch_device(self, device: torch.device | None) -> None:
        """Also publish how many steps this CUDA device has finished; None for a job without one."""
        self._stepping = None if device is None else self._progress_of(device)

    def update_begins(self) -> None:
        """Publish that the optimizer's update begins."""
        self._thread = threading.get_ident()
        self._writer.advance(Phase.OPTIMIZER)

    def step_finished(self, step: int) -> None:
        """Publish that ``step`` steps have finished."""
        self._writer.next_step(step)
        if self._stepping is not None:
            self._stepping.step_finished(step)

    def start_from(self, step: int) -> None:
        """Continue from a checkpoint of this step."""
        self._writer.start_from(step)
        if self._device is not None:
            self._device.step_finished(step)

    def watch_input(self, source: Iterable[_Batch]) -> WatchedInput[_Batch]:
        return WatchedInput(source, self)

    @contextmanager
    def during(self, phase: Phase, *, is_compared: bool = True) -> Iterator[None]:
        """Publish the begin of a phase, and then its end. Its duration is noted if it ``is_compared`` with
        that of peers."""
        phases = self._phases.open
        phases.append(phase)
        self._writer.advance(phase)
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            if is_compared:
                self._writer.time_phase(phase, seconds)
            phases.pop()
            if not phases:  # otherwise it is part of the outer phase
                self._writer.leave_out(phase, seconds)
            self._writer.advance(phases[-1] if phases else Phase.IDLE)

    def marked(self, phase: Phase, *, is_compared: bool) -> AbstractContextManager[None]:
        """Like ``during``, for phases that are recognized and not announced by the user. An open phase takes
        precedence, and so does SCOUT's own work; other threads than training's are ignored."""
        if self._phases.open or in_own_work() or threading.get_ident() != self._thread:
            return nullcontext()
        return self.during(phase, is_compared=is_compared)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


class WatchedInput(Generic[_Batch]):
    """Wraps the user's source of batches; its other attributes are available through the wrapper."""

    def __init__(self, source: Iterable[_Batch], publisher: Publisher) -> None:
        self._source, self._publisher = source, publisher

    def __iter__(self) -> Iterator[_Batch]:
        batches = iter(self._source)
        while True:
            with self._publisher.during(Phase.INPUT):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # as the source itself would

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
