"""The rows of the paper's table of fault-injection coverage, in its order."""

from __future__ import annotations

from torchscout.cli.campaign.cell import Row

__all__ = ["DEVICE_ROWS", "ROWS", "row_of"]

ROWS = (
    Row(
        "dense-sdc",
        "Dense SDC",
        "rank 9, persistently, after two accepted checks: a DDP parameter, an FSDP2 replay output, an HSDP "
        "gradient shard; then new processes go on",
    ),
    Row(
        "numerical-sdc",
        "Dense numerical SDC",
        "one forward output or parameter of one rank, 64 of them in the lowest bits",
    ),
    Row("numerical-clean", "Dense numerical, fault-free", "nothing"),
    Row("compute-straggler", "Compute straggler", "rank 9's layers take 250 ms longer"),
    Row(
        "communication-straggler",
        "Communication straggler",
        "rank 15's tensor-parallel collective takes 250 ms longer",
    ),
    Row(
        "moe-sdc",
        "MoE SDC",
        "rank 15's expert weights when 128, and when 512 routed rows are due, after one clean recipe cycle",
    ),
    Row("moe-clean", "MoE, fault-free", "nothing, for two recipe cycles"),
    Row(
        "hang",
        "Hang and input stall",
        "one rank frozen, stopped, late with its input, or in another collective",
    ),
    Row("hang-clean", "Hang, fault-free", "nothing"),
    Row(
        "moe-kernel",
        "MoE kernel-role SDC",
        "inside the expert kernel: every work item of the selected shapes, of both projections; and one, "
        "persistently, on rank 7 of 8 and on rank 15 of 16",
    ),
)
DEVICE_ROWS = (Row("device-hang", "Device stuck (CUDA only)", "one rank's kernel does not end for 6 s"),)
"""What only a device can show; not in the paper's table."""


def row_of(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)
