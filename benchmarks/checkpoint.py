"""What checkpoints cost: how long training is held, what else it loses, and how long it takes to go back.

    python benchmarks/checkpoint.py [--part NAME ...] [--megabytes N] [--json] [--output FILE]

``capture`` snapshots one rank's state into memory, on CUDA where there is one: the time training's thread is
held, in ``capture`` and in the ``fence`` before the next update, against one plain copy of the same state to
memory that is there already, against ``torch.save`` into the same file system and against
``torch.distributed.checkpoint.async_save``, all of the same state, call by call in turn. The time between
capture and fence is a forward and backward pass; how much longer a step gets while a capture is in flight is
measured beside it, and, without training, the time until all is kept. On a CPU training computes with one
thread, as one of several ranks of a machine would.

``bandwidth`` is a capture's way from the device to the host, against a plain copy to pinned memory; only with
CUDA. ``replicate`` copies a snapshot into another process' memory, encrypted and verified, against the same
bytes over plain TCP, and measures training's steps meanwhile; ``stages`` is what each stage of that costs a
core. ``restore`` finds, verifies and puts back a
rank's state, from memory and from disk, against ``torch.load`` and ``torch.distributed.checkpoint.load``.

Every ratio is taken within one run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from checkpoint_parts.bandwidth import bandwidth
from checkpoint_parts.capture import capture
from checkpoint_parts.job import CUDA, Figures
from checkpoint_parts.replicate import replicate
from checkpoint_parts.restore import restore
from checkpoint_parts.stages import stages
from reporting import environment, heading, parser_of, publish


def main() -> None:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--megabytes", type=int, default=8192 if CUDA else 384, help="of state, about")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {
        **environment("torch", on_cuda=CUDA),
        "megabytes": arguments.megabytes,
        "results": {name: PARTS[name](arguments.megabytes) for name in arguments.part or PARTS},
    }
    publish(report, table, arguments)


def table(report: dict[str, Any]) -> str:
    lines = [heading(report)]
    for part, figures in report["results"].items():
        lines += ["", part]
        for name, row in figures.items():
            cells = ", ".join(_cell(key, value) for key, value in row.items() if value is not None)
            lines.append(f"  {name:20} {cells}")
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    return f"{key}: {value}" if isinstance(value, str) else f"{key} {value}"


PARTS: dict[str, Callable[[int], Figures]] = {
    each.__name__: each for each in (capture, bandwidth, replicate, stages, restore)
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
