"""What a signature costs next to reading the same bytes once: ``x.view(torch.int64).sum().item()``.

    python benchmarks/signature.py [--device cpu|cuda] [--json] [--output FILE] [--sweep]

Both sides are timed end to end on the wall clock, transfer of the result included, and alternate within
one run; a figure is the median over all repetitions, and ``ratio`` is ours over theirs in bandwidth.
On CUDA every timed call reads another buffer out of at least a gibibyte, so that neither side finds its
input in the L2 cache, least of all the input that the other side has just read. On the host one
thread reads one buffer, and what a large L3 cache holds of it serves both sides alike. ``--sweep`` times
the kernel under several launches instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from reporting import environment, heading, parser_of, publish

from torchscout.c3.signature import signature

if TYPE_CHECKING:
    from torchscout.c3.fold_triton import Launch

MIB = 1 << 20
SIZES = {"cpu": [64 * MIB, 256 * MIB], "cuda": [16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]}
GOALS = {
    ("cpu", 64 * MIB): 0.45,
    ("cpu", 256 * MIB): 0.45,
    ("cuda", 16 * MIB): 0.70,
    ("cuda", 64 * MIB): 0.70,
    ("cuda", 256 * MIB): 0.70,
    ("cuda", 1024 * MIB): 0.95,
}
ROTATION = 1024 * MIB
"""On CUDA the buffers of one size fill this much memory, many times any L2 cache."""


def main() -> None:
    arguments = parsed_arguments()
    torch.set_num_threads(1)
    on_cuda = arguments.device == "cuda"
    packages = ("torch", "xxhash", "triton") if on_cuda else ("torch", "xxhash")
    report = {"benchmark": "signature", **environment(*packages, on_cuda=on_cuda)}
    if arguments.sweep:
        report["sweep"] = sweep()
    else:
        report["results"] = [compare(arguments.device, size) for size in SIZES[arguments.device]]
    publish(report, table, arguments)


def parsed_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=list(SIZES))
    parser.add_argument("--sweep", action="store_true", help="time the kernel under several launches (CUDA)")
    arguments = parser.parse_args()
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.sweep and arguments.device != "cuda":
        parser.error(f"--sweep needs --device cuda, got {arguments.device}")
    return arguments


def compare(device: str, size: int) -> dict[str, Any]:
    buffers = rotation(device, size)
    repetitions = 15 if device == "cpu" else max(50, min(500, 64 * ROTATION // size))
    ours, theirs = interleaved(signature, integer_sum, buffers, repetitions)
    return {
        "bytes": size,
        "signature_us": round(ours * 1e6, 2),
        "sum_us": round(theirs * 1e6, 2),
        "signature_gb_per_s": round(size / ours / 1e9, 2),
        "sum_gb_per_s": round(size / theirs / 1e9, 2),
        "ratio": round(theirs / ours, 3),
        "goal": GOALS[device, size],
        "extra_device_bytes": extra_device_bytes(buffers[0]) if device == "cuda" else None,
        "repetitions": repetitions,
        "buffers": len(buffers),
    }


def rotation(device: str, size: int) -> list[torch.Tensor]:
    count = max(2, ROTATION // size) if device == "cuda" else 1
    return [torch.randn(size // 4, device=device) for _ in range(count)]


def integer_sum(tensor: torch.Tensor) -> float:
    return tensor.view(torch.int64).sum().item()


def interleaved(
    ours: Callable[[torch.Tensor], object],
    theirs: Callable[[torch.Tensor], object],
    buffers: list[torch.Tensor],
    repetitions: int,
) -> tuple[float, float]:
    """Median seconds of either side; who goes first alternates, and nobody reads the other's last input."""
    sides = (ours, theirs)
    times: tuple[list[float], list[float]] = ([], [])
    distance = len(buffers) // 2
    for repetition in range(-3, repetitions):  # the first three warm up
        for turn in (0, 1):
            side = (repetition + turn) % 2
            tensor = buffers[(repetition + side * distance) % len(buffers)]
            seconds = timed(sides[side], tensor)
            if repetition >= 0:
                times[side].append(seconds)
    return statistics.median(times[0]), statistics.median(times[1])


def timed(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call(tensor)  # returns a number: the result has arrived
    return time.perf_counter() - begin


def extra_device_bytes(tensor: torch.Tensor) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    signature(tensor)
    return torch.cuda.max_memory_allocated() - before


def sweep() -> list[dict[str, Any]]:
    """Kernel time on the device, and ratio end to end, for launches around the default."""
    from torchscout.c3.fold_triton import LAUNCH, Launch, fold_with_triton

    rotations = {size: rotation("cuda", size) for size in (16 * MIB, 256 * MIB, 1024 * MIB)}
    launches = [
        Launch(block, warps, programs)
        for block in (512, 1024, 2048, 4096)
        for warps in (4, 8)
        for programs in (2, 4, 8, 16)
    ]
    rows = []
    for launch in launches:
        row: dict[str, Any] = {**launch._asdict(), "default": launch == LAUNCH}

        def fold(tensor: torch.Tensor, launch: Launch = launch) -> object:
            return fold_with_triton([tensor], launch).tolist()

        for size, buffers in rotations.items():
            ours, theirs = interleaved(fold, integer_sum, buffers, 40)
            row[f"{size // MIB} MiB"] = {
                "kernel_gb_per_s": round(size / kernel_seconds(launch, buffers) / 1e9, 1),
                "ratio": round(theirs / ours, 3),
            }
        rows.append(row)
    return rows


def kernel_seconds(launch: Launch, buffers: list[torch.Tensor]) -> float:
    """Median time of the kernel alone, between events; a sleep first lets the host queue all of them."""
    from torchscout.c3.fold_triton import FoldKernel

    words = torch.zeros(3, dtype=torch.int64, device="cuda")
    result, scratch = words.data_ptr(), words[1:].data_ptr()
    kernel = FoldKernel(launch, torch.cuda.get_device_properties(words.device).multi_processor_count)
    kernel.fold(result, scratch, buffers[0].data_ptr(), buffers[0].nbytes)  # compiles
    pairs = []
    torch.cuda._sleep(20_000_000)
    for tensor in (buffers * 16)[:16]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel.fold(result, scratch, tensor.data_ptr(), tensor.nbytes)
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3


def table(report: dict[str, Any]) -> str:
    lines = [heading(report), ""]
    if "sweep" in report:
        return "\n".join(lines + sweep_lines(report["sweep"]))
    lines.append("    size    signature          sum   signature        sum   ratio    goal  extra memory")
    for row in report["results"]:
        extra = row["extra_device_bytes"]
        lines.append(
            f"{row['bytes'] // MIB:4} MiB {row['signature_us']:9.1f} us {row['sum_us']:9.1f} us"
            f" {row['signature_gb_per_s']:6.1f} GB/s {row['sum_gb_per_s']:5.1f} GB/s"
            f" {row['ratio']:7.3f} {row['goal']:7.2f}  {'' if extra is None else f'{extra} B':>12}"
        )
    return "\n".join(lines)


def sweep_lines(rows: list[dict[str, Any]]) -> list[str]:
    sizes = [name for name in rows[0] if name.endswith("MiB")]
    head = "block warps programs  " + "  ".join(f"{size:>9} kernel  ratio" for size in sizes)
    lines = [head]
    for row in rows:
        cells = "  ".join(
            f"{row[size]['kernel_gb_per_s']:11.1f} GB/s {row[size]['ratio']:5.3f}" for size in sizes
        )
        mark = "*" if row["default"] else " "
        lines.append(f"{row['block']:5} {row['warps']:5} {row['programs']:8} {mark}{cells}")
    return [*lines, "* the default"]


if __name__ == "__main__":
    main()
