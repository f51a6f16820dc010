"""Publishes a trainer's progress: layers, optimizer, input, checkpoints, collectives (paper, section 7).

Intent is published before the operation that may block. All of it uses PyTorch's public hooks and the
interceptor of collectives; nothing of the user's is patched or replaced. A collective is published as its
fingerprint: what healthy callers have in common, in words and in 64 bits. Values that differ legitimately
are left out: the splits of an all-to-all obey a compatibility rule of their own, a scatter's root gives
what the others do not, and a shard's shape may be its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from torchscout.collectives.call import POINT_TO_POINT, Call, Group
from torchscout.collectives.interceptor import Pending
from torchscout.decision.progress import CommGroup, Phase
from torchscout.observer.device import DeviceProgress, Track
from torchscout.observer.record.writer import NOWHERE, ProgressWriter
from torchscout.utils.reentrancy import in_backward, in_own_work

__all__ = ["Fingerprint", "Publisher", "WatchedInput", "line_of", "read"]

# Where all callers must name the same shapes. A scatter is compared by what everybody gets, a
# gather by what everybody gives; an all-gather's output and a reduce-scatter's input are whole,
# while a rank's own part may be uneven.
_BY_OUTPUT = frozenset({"all_gather", "scatter", "recv"})
_ONE = (1,)
"""A number is a vector of one: stages of a DeepSpeed pipeline reduce their norms as either, together."""
_WITHOUT_SHAPE = frozenset({"all_to_all", "barrier"})


class Fingerprint(NamedTuple):
    """What callers must share, as read from a call; equal ones are one phrase."""

    operation: str
    dtype: Hashable
    shapes: tuple[tuple[int, ...], ...]
    reduction: str | None
    root: int | None

    @property
    def text(self) -> str:
        """For a person: ``all_reduce float32[1024] sum``, ``broadcast int64[2] from 0``."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        shapes = " ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(filter(None, (self.operation, dtype + shapes, self.reduction, root)))

    @property
    def number(self) -> int:
        return xxhash.xxh3_64_intdigest(self.text.encode())


def read(call: Call) -> Fingerprint:
    """The fingerprint of a call; both ends of a transfer have the same."""
    operation = call.operation
    if operation in _WITHOUT_SHAPE:
        return Fingerprint(operation, call.dtype, (), None, None)
    given = call.output_shapes if operation in _BY_OUTPUT else call.input_shapes
    shapes = tuple([shape or _ONE for shape in given])
    if operation in POINT_TO_POINT:
        return Fingerprint("transfer", call.dtype, shapes, None, None)
    return Fingerprint(operation, call.dtype, shapes, call.reduction, call.root)


def line_of(call: Call) -> CommGroup | None:
    """What the call is counted on; None for a receive from anyone, which matches no particular send."""
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
    """Seconds after which the library gives up; SCOUT's own groups do not end anybody."""
    if call.group.is_scouts or call.device is None:
        return None
    try:
        options = call.process_group._get_backend(call.device).options
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options, or of another device
        return None


def _key(call: Call) -> str:
    """The group's name alone need not be unique in the job: another group elsewhere may have it. And a group
    may have one backend for the host and one for devices, which count by themselves."""
    group, device = call.group, call.device
    members = ",".join(map(str, group.members or ()))
    where = "" if device is None or device.type == "cpu" else f"/{device.type}"
    return f"{group.name}@{xxhash.xxh3_64_hexdigest(members.encode())[:8]}{where}"


def _name(group: Group) -> str:
    described = group.description not in ("", "undefined")
    return group.description if described else f"group {group.name}"


_Batch = TypeVar("_Batch")
_REMEMBERED = 4096


class Publisher:
    """Everything that writes a trainer's progress record. Listens to collectives."""

    def __init__(self, writer: ProgressWriter) -> None:
        self._writer = writer
        self._lines: dict[tuple[Any, ...], tuple[int, Track | None]] = {}
        self._phrases: dict[Fingerprint, int] = {}
        self._went_back = False
        """Whether there was a backward in this step."""
        self._device: DeviceProgress | None = None
        self._stepping: DeviceProgress | None = None
        """Of the device whose finished steps are published."""
        self._undo: list[Callable[[], None]] = []

    def before(self, call: Call) -> None:
        """Publish the intent to enter a collective; SCOUT's own too, for a rank may be stuck in a check."""
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
            if len(self._phrases) < _REMEMBERED:  # shapes that never repeat must not fill the memory
                self._phrases[shared] = phrase
        sent, received = call.splits or (None, None)
        number = self._writer.issue(line, phrase, sent, received)
        if track is not None and self._device is not None:
            self._device.record(track, number)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """That the backend has it says nothing about the others."""

    def _declare(self, call: Call, device: torch.device | None) -> tuple[int, Track | None]:
        """The line a call is counted on, and where a device enters its operations, what shows how far that
        is."""
        line = line_of(call)
        index = NOWHERE if line is None else self._writer.declare(line)
        if index == NOWHERE or device is None or not _is_entered_by(device, call):
            return index, None
        return index, self._progress_of(device).track(index)

    def _progress_of(self, device: torch.device) -> DeviceProgress:
        if self._device is None:
            self._device = DeviceProgress(self._writer, device)
            self._undo.append(self._device.close)
        return self._device

    def watch_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        """Publish a coordinate whenever a layer's forward or backward begins."""
        writer = self._writer

        def before_backward(_: torch.Tensor) -> None:
            self._went_back = True
            writer.advance(Phase.BACKWARD)

        def before_forward(_: torch.nn.Module, __: Any) -> None:
            # Dynamo would trace the hook into the user's graph; it sees a constant instead.
            if not torch.compiler.is_compiling() and not in_own_work():
                writer.advance(Phase.FORWARD)

        def after_forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or in_own_work():
                return
            # A hook on the tensor, not on the module: the latter would put a node of its own into
            # the user's graph, and forbid changing the output in place.
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(before_backward)  # type: ignore[no-untyped-call]
                    break

        for layer in layers:
            self._undo.append(layer.register_forward_pre_hook(before_forward).remove)
            self._undo.append(layer.register_forward_hook(after_forward).remove)

    def watch_steps(self, layer: torch.nn.Module, finished: Callable[[], None]) -> None:
        """Without an optimizer to watch, a step ends when its first layer begins anew after a backward.

        ``finished`` is called then, and has to call ``step_finished``.
        """

        def before_forward(_: torch.nn.Module, __: Any) -> None:
            if not torch.compiler.is_compiling() and self._went_back and not in_backward():
                self._went_back = False
                finished()

        # Prepended: the forward is the next step's.
        self._undo.append(layer.register_forward_pre_hook(before_forward, prepend=True).remove)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
        """Publish the optimizer's updates, where nobody else counts steps; see ``watch_device``."""
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
        self._writer.advance(Phase.OPTIMIZER)

    def step_finished(self, step: int) -> None:
        """Publish that so many steps are finished."""
        self._writer.next_step(step)
        if self._stepping is not None:
            self._stepping.step_finished(step)

    def start_from(self, step: int) -> None:
        """The job goes on from a checkpoint of this step."""
        self._writer.start_from(step)
        if self._device is not None:
            self._device.step_finished(step)

    def watch_input(self, source: Iterable[_Batch]) -> WatchedInput[_Batch]:
        return WatchedInput(source, self)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Publish that a phase has begun and, at its end, that it is over and how long it took."""
        self._writer.advance(phase)
        begin = time.monotonic()
        try:
            yield
        finally:
            self._writer.time_phase(phase, time.monotonic() - begin)
            self._writer.advance(Phase.IDLE)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def _is_entered_by(device: torch.device, call: Call) -> bool:
    """Whether the host only issues the operation: so over NCCL. Gloo's run on the host, whatever they
    move."""
    return device.type == "cuda" and "nccl" in call.process_group._get_backend(device).name()


class WatchedInput(Generic[_Batch]):
    """The user's own source of batches; whatever else it has is reached through this one."""

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
