"""The Triton kernel of the grouped GEMM, for all three passes (paper, section 6.2).

On request it counts its execution paths (see [Note: the execution paths]) or perturbs one work item.
``grouped_gemm`` handles shapes, dtypes and buffers. Counters do not change results: only one program writes
to each result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchscout.experts.kernel.work_items import Pass, WorkItem

__all__ = ["INTERPRETED", "grouped_gemm_kernel"]

# A kernel takes operands, sizes and constants one by one, and conditions on constants are separate.
# ruff: noqa: N803, PLR0913, PLR0917, SIM102


_FORWARD = tl.constexpr(Pass.FORWARD.value)
_INPUT = tl.constexpr(Pass.INPUT_GRADIENT.value)
_WEIGHT = tl.constexpr(Pass.WEIGHT_GRADIENT.value)
_EMPTY = tl.constexpr(WorkItem.EMPTY.value)
_STEP_FULL = tl.constexpr(WorkItem.STEP_FULL.value)
_STEP_TAIL = tl.constexpr(WorkItem.STEP_TAIL.value)
_LAST_TILE = tl.constexpr(WorkItem.LAST_TILE.value)
_FOLLOWING_TILE = tl.constexpr(WorkItem.FOLLOWING_TILE.value)
_WAVES = tl.constexpr(WorkItem.WAVES.value)
_WHOLE_TILE = tl.constexpr(-1)  # a fault in the finished tile instead of a step
_NOWHERE = tl.constexpr(-2)


@triton.jit(do_not_specialize=["experts"])  # type: ignore[untyped-decorator]
def grouped_gemm_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    hidden: tl.tensor,
    intermediate: tl.tensor,
    counters: tl.tensor,
    fault: tl.tensor,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    INJECT: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Compute every tile of this program: program p computes tiles p, p + programs, ..."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column_tiles = ((hidden if PASS == _INPUT else intermediate) + COLUMNS - 1) // COLUMNS
    first_row = tl.full([], 0, tl.int64)
    matrix = tl.full([], 0, tl.int64)  # offset of the expert's weights
    begin = tl.full([], 0, tl.int32)
    taken = tl.full([], 0, tl.int32)
    mine = program
    for expert in range(experts):
        count = tl.load(rows + expert)
        row_tiles = ((hidden if PASS == _WEIGHT else count) + ROWS - 1) // ROWS
        end = begin + row_tiles * column_tiles
        while mine < end:
            m, n = _place(mine - begin, row_tiles, column_tiles, GROUP)
            height = (hidden if PASS == _WEIGHT else count) - m * ROWS
            width = (hidden if PASS == _INPUT else intermediate) - n * COLUMNS
            role = _role(height, width, count, PASS, ROWS, COLUMNS)
            at = _NOWHERE
            if INJECT:
                at = tl.where(tl.load(fault) == mine, tl.load(fault + 1), _NOWHERE)
            sums, full, tail, seen = _product(
                a, b, first_row, matrix, m, n, count, height, width, hidden, intermediate, at,
                PASS, ROWS, COLUMNS, STEP, INJECT, WIDEN,
            )  # fmt: skip
            _store(
                out, sums, first_row, matrix, m, n, height, width, hidden, intermediate,
                PASS, ROWS, COLUMNS,
            )  # fmt: skip
            taken += 1
            if INJECT:
                _record_fault(fault, at, role, seen)
            if COUNT:
                tl.atomic_add(counters + role, 1, sem="relaxed")
                tl.atomic_add(counters + _STEP_FULL, full, sem="relaxed")
                tl.atomic_add(counters + _STEP_TAIL, tail, sem="relaxed")
            mine += programs
        if COUNT and PASS != _WEIGHT:
            if (count == 0) & (program == 0):  # all programs skip it; one counts it
                tl.atomic_add(counters + _EMPTY, 1, sem="relaxed")
        begin = end
        first_row += count
        matrix += hidden * intermediate
    if COUNT:
        if taken > 0:
            tl.atomic_add(counters + _LAST_TILE, 1, sem="relaxed")
            tl.atomic_add(counters + _FOLLOWING_TILE, taken - 1, sem="relaxed")
            tl.atomic_max(counters + _WAVES, taken, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    index: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return row and column of a tile: groups of rows, each group column by column."""
    group = GROUP * column_tiles
    first = index // group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = index % group
    return first + within % size, within // size


@triton.jit  # type: ignore[untyped-decorator]
def _role(
    height: tl.tensor,
    width: tl.tensor,
    count: tl.tensor,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    row_tail = tl.where(height >= ROWS, 0, tl.where(height * 2 < ROWS, 1, 2))
    role = row_tail + tl.where(width >= COLUMNS, 0, 3)
    if PASS == _WEIGHT:
        role = tl.where(count == 0, _EMPTY, role)
    return role


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    a: tl.tensor,
    b: tl.tensor,
    first_row: tl.tensor,
    matrix: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    hidden: tl.tensor,
    intermediate: tl.tensor,
    at: tl.tensor,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    INJECT: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the sums of one tile, its numbers of full and tail steps, and the path of the perturbed step."""
    if PASS == _FORWARD:  # x [row, hidden], weights [hidden, intermediate]
        length, a_row, a_step, b_step, b_column = hidden, hidden, 1, intermediate, 1
        a += (first_row + m * ROWS) * hidden
        b += matrix + n * COLUMNS
    elif PASS == _INPUT:  # gradient [row, intermediate], weights transposed
        length, a_row, a_step, b_step, b_column = intermediate, intermediate, 1, 1, intermediate
        a += (first_row + m * ROWS) * intermediate
        b += matrix + n * COLUMNS * intermediate
    else:  # x transposed, gradient [row, intermediate]
        length, a_row, a_step, b_step, b_column = count, 1, hidden, intermediate, 1
        a += first_row * hidden + m * ROWS
        b += first_row * intermediate + n * COLUMNS
    row, column, lane = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    a_tile = row[:, None] * a_row + lane[None, :] * a_step
    b_tile = lane[:, None] * b_step + column[None, :] * b_column
    sums = tl.full((ROWS, COLUMNS), 0, tl.float32)
    full, tail, seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    steps = length // STEP
    for step in range(steps):
        x = tl.load(a + a_tile, mask=(row < height)[:, None], other=0.0)
        y = tl.load(b + b_tile, mask=(column < width)[None, :], other=0.0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        sums = tl.dot(x, y, sums)
        full += 1
        if INJECT:
            sums = _perturbed(sums, at == step, height, width, ROWS, COLUMNS)
            seen += tl.where(at == step, _STEP_FULL, 0)
        a += STEP * a_step
        b += STEP * b_step
    left = length - steps * STEP
    if left > 0:
        x = tl.load(a + a_tile, mask=(row < height)[:, None] & (lane < left)[None, :], other=0.0)
        y = tl.load(b + b_tile, mask=(lane < left)[:, None] & (column < width)[None, :], other=0.0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        sums = tl.dot(x, y, sums)
        tail += 1
        if INJECT:
            sums = _perturbed(sums, at == steps, height, width, ROWS, COLUMNS)
            seen += tl.where(at == steps, _STEP_TAIL, 0)
    if INJECT:
        sums = _perturbed(sums, at == _WHOLE_TILE, height, width, ROWS, COLUMNS)
    return sums, full, tail, seen


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    out: tl.tensor,
    sums: tl.tensor,
    first_row: tl.tensor,
    matrix: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    hidden: tl.tensor,
    intermediate: tl.tensor,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    features = hidden if PASS == _INPUT else intermediate
    if PASS == _WEIGHT:
        out += matrix + m * ROWS * features + n * COLUMNS
    else:
        out += (first_row + m * ROWS) * features + n * COLUMNS
    place = out + (row[:, None] * features + column[None, :])
    inside = (row < height)[:, None] & (column < width)[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _perturbed(
    sums: tl.tensor,
    here: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return the sums, with the last valid one increased if the fault is ``here``."""
    row = tl.arange(0, ROWS) == tl.minimum(height, ROWS) - 1
    column = tl.arange(0, COLUMNS) == tl.minimum(width, COLUMNS) - 1
    return tl.where((row[:, None] & column[None, :]) & here, sums + tl.abs(sums) + 1.0, sums)


@triton.jit  # type: ignore[untyped-decorator]
def _record_fault(fault: tl.tensor, at: tl.tensor, role: tl.tensor, seen: tl.tensor) -> None:
    """Record that the fault fired, with the paths of tile and step; a missing step does not fire."""
    if (at == _WHOLE_TILE) | (seen > 0):
        tl.atomic_add(fault + 2, 1, sem="relaxed")
        tl.store(fault + 3, role)
        tl.store(fault + 4, seen)


INTERPRETED = not isinstance(grouped_gemm_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernel, on any device; decided when Triton was imported."""
