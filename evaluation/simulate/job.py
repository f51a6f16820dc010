"""A job on paper: its process groups, and the operations of one training step.

A step is a sequence of *ticks*. At each tick some lines have an operation, and all members of a line have it
at the same tick. So ranks that follow their programs never wait in a cycle, and what a stopped rank holds up
is found in one pass over the ticks.

Microbatches pass through the stages forward and back. Each stage has operations of its tensor and expert
groups. Gradients are reduced among replicas, partly in the background, and the whole job adds up their norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evaluation.simulate.layouts import Layout
from torchscout.decision.progress import CommGroup, Phase
from torchscout.mesh import LayerKind

__all__ = ["NOTHING", "Ints", "Job", "Slot", "Tick"]

Ints = npt.NDArray[np.int64]
NOTHING = -1
"""The line of a rank that has none of a kind. A *line* is the place of a ``CommGroup`` in ``Job.lines``."""
_MICROBATCHES = 4


class Tick(NamedTuple):
    """Operations that may take place at the same time."""

    kind: str
    """Which line of a rank; of a transfer between stages, the sender's."""
    stages: tuple[int, ...]
    """The stages that take part; of a transfer, the senders."""
    text: str
    phase: Phase
    posted: bool = False
    """Whether ranks go on without waiting for it."""


class Slot(NamedTuple):
    """One operation in the program of a stage."""

    tick: int
    kind: str
    ordinal: int
    """How many operations of the same line precede it in the step."""
    text: str
    phase: Phase


_RECEIVED = {"to_next": "from_previous", "to_previous": "from_next"}


class Job:
    """The lines and programs of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.mesh = layout, layout.mesh()
        self.size = layout.ranks
        self.lines: list[CommGroup] = []
        self.line_of: dict[str, Ints] = {}
        """Kind -> the line of each rank, ``NOTHING`` without one."""
        self._add_groups()
        self._add_pairs()
        self.stage: Ints = np.arange(self.size) // layout.between_stages % layout.pipeline
        self.ticks = [each for each in _step(layout) if each.stages and each.kind in self.line_of]
        self.tick_lines = [self._lines_at(tick) for tick in self.ticks]
        """The line of each rank at each tick, ``NOTHING`` if it takes no part."""
        self.programs = [self._program(stage) for stage in range(layout.pipeline)]
        """The operations of a step, by stage."""

    @cached_property
    def groups_of(self) -> dict[str, list[CommGroup | None]]:
        """Kind -> the group of each rank."""
        return {
            kind: [None if line == NOTHING else self.lines[line] for line in lines.tolist()]
            for kind, lines in self.line_of.items()
        }

    @cached_property
    def counts(self) -> list[list[dict[str, int]]]:
        """By stage and by the number of operations entered in a step: how many of each kind."""
        found = []
        for program in self.programs:
            counts: list[dict[str, int]] = [dict.fromkeys((slot.kind for slot in program), 0)]
            for slot in program:
                counts.append({**counts[-1], slot.kind: counts[-1][slot.kind] + 1})
            found.append(counts)
        return found

    @cached_property
    def entered_before(self) -> Ints:
        """By stage and tick: how many operations of a step come before it."""
        taken = np.zeros((len(self.programs), len(self.ticks)), dtype=np.int64)
        for stage, program in enumerate(self.programs):
            taken[stage, [slot.tick for slot in program]] = 1
        return np.concatenate([np.zeros((len(taken), 1), dtype=np.int64), taken.cumsum(axis=1)], axis=1)

    def members(self, line: int) -> tuple[int, ...]:
        return self.lines[line].members

    def _add_groups(self) -> None:
        layout, mesh = self.layout, self.mesh
        groups = {
            "tensor": mesh.groups_along("tensor", LayerKind.DENSE),
            "replica": mesh.groups_along("replica", LayerKind.DENSE),
            "world": [tuple(range(self.size))],
        }
        if layout.expert > 1:
            in_tensor = layout.expert_in_tensor
            groups["expert"] = (
                groups["tensor"] if in_tensor else mesh.groups_along("expert", LayerKind.EXPERT)
            )
        for kind, found in groups.items():
            if len(found[0]) > 1:
                lines = np.full(self.size, NOTHING)
                for members in found:
                    lines[list(members)] = len(self.lines)
                    self.lines.append(CommGroup(f"{kind}.{members[0]}", members, kind))
                self.line_of[kind] = lines

    def _add_pairs(self) -> None:
        apart, stages = self.layout.between_stages, self.layout.pipeline
        if stages == 1:
            return
        ranks = np.arange(self.size)
        senders = ranks[ranks // apart % stages < stages - 1]
        for kind, sources, destinations in (
            ("to_next", senders, senders + apart),
            ("to_previous", senders + apart, senders),
        ):
            first = len(self.lines)
            for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
                key = f"{source}>{destination}"
                name = f"{source} -> {destination}"
                self.lines.append(CommGroup(key, (source, destination), name, pair=True))
            for each, place in ((kind, sources), (_RECEIVED[kind], destinations)):
                lines = np.full(self.size, NOTHING)
                lines[place] = np.arange(first, first + len(sources))
                self.line_of[each] = lines

    def _lines_at(self, tick: Tick) -> Ints:
        lines = np.where(np.isin(self.stage, tick.stages), self.line_of[tick.kind], NOTHING)
        if (received := _RECEIVED.get(tick.kind)) is not None:
            shift = 1 if tick.kind == "to_next" else -1
            receivers = np.isin(self.stage, [stage + shift for stage in tick.stages])
            lines = np.where(receivers, self.line_of[received], lines)
        return lines.astype(np.int32)

    def _program(self, stage: int) -> list[Slot]:
        shift = {"to_next": -1, "to_previous": 1}
        slots, before = [], Counter[str]()
        for number, tick in enumerate(self.ticks):
            kind = tick.kind if stage in tick.stages else None
            if kind is None and tick.kind in shift and stage + shift[tick.kind] in tick.stages:
                kind = _RECEIVED[tick.kind]
            if kind is not None:
                slots.append(Slot(number, kind, before[kind], tick.text, tick.phase))
                before[kind] += 1
        return slots


def _step(layout: Layout) -> Iterator[Tick]:
    """Yield the ticks of one step, in order."""
    stages, last = layout.pipeline, _MICROBATCHES + layout.pipeline - 1
    everyone = tuple(range(stages))
    for phase, kind in ((Phase.FORWARD, "to_next"), (Phase.BACKWARD, "to_previous")):
        for moment in range(last):
            active = [s for s in everyone if 0 <= moment - s < _MICROBATCHES]
            if phase is Phase.BACKWARD:
                active = [stages - 1 - stage for stage in active]
            name = phase.value
            yield Tick("tensor", tuple(active), f"all_gather bfloat16[{name},8192]", phase)
            yield Tick("expert", tuple(active), f"all_to_all bfloat16[{name},dispatch]", phase)
            yield Tick("expert", tuple(active), f"all_to_all bfloat16[{name},combine]", phase)
            if phase is Phase.BACKWARD:
                final = tuple(s for s in active if moment - (stages - 1 - s) == _MICROBATCHES - 1)
                yield Tick("replica", final, "reduce_scatter bfloat16[bucket0]", phase, posted=True)
            yield Tick("tensor", tuple(active), f"reduce_scatter bfloat16[{name},8192]", phase)
            senders = [s for s in active if 0 <= s + (1 if kind == "to_next" else -1) < stages]
            # A stage sends to one neighbour before it receives from the other, or the other way round.
            for parity in (0, 1):
                some = tuple(s for s in senders if s % 2 == parity)
                yield Tick(kind, some, f"send bfloat16[{name},8192]", phase)
    yield Tick("replica", everyone, "reduce_scatter bfloat16[bucket1]", Phase.BACKWARD)
    yield Tick("world", everyone, "all_reduce float32[1] sum", Phase.OPTIMIZER)
    yield Tick("replica", everyone, "all_gather bfloat16[bucket0]", Phase.OPTIMIZER)
