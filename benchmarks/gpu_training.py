"""What torchscout costs a training job: steps without and with a check, by subsystem, by part of a check.

    python benchmarks/gpu_training.py [--model 300m|1b|tiny] [--parallel ddp|fsdp2] [--part NAME ...]
        [--json | --markdown] [--output FILE]
    python benchmarks/gpu_training.py --read FILE [--markdown]

Three NCCL ranks share one CUDA device; ``--device cpu --backend gloo --model tiny`` tries the script without.
One set of processes trains one model, and torchscout is attached and closed again: before and after each
window of steps with it there is one without, and every ratio is that of a window to its two neighbours. Steps
are timed by events on the device; it is waited for before and after a window, not inside. A window with
checks begins right after a check and ends with one, so that what a check does to the steps after it counts.

``steps`` measures steps on which nothing is due, by subsystem, and checks of everything; ``recipes`` measures
checks of one recipe each, ``default`` the default configuration. ``reference`` times the forward and backward
passes that a check replays alone, and one broadcast of their inputs. ``exchanges`` counts what a check
communicates, and how often it waits for the device. ``collectives`` measures the observer's cost of one
collective. ``end-to-end`` measures whole jobs with and without checkpoints, as a user runs them.
``breakdown`` shows the parts of a check; there alone the device is waited for between parts.

``--output`` keeps the raw times of every step of every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reporting import environment
from training_parts.job import MODELS
from training_parts.measure import PARTS, Plan, measure
from training_parts.report import markdown, summary, table

from torchscout.testing.local_ranks import preload, run_ranks

RANKS = 3


def main() -> None:
    arguments = _arguments()
    if arguments.read:
        report = json.loads(arguments.read.read_text())
        report["figures"] = summary(report)
    else:
        report = _measured(arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(report) + "\n")
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(markdown(report) if arguments.markdown else table(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="300m")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=4, help="how often each way to attach is measured")
    parser.add_argument("--steps", type=int, default=20, help="of one window")
    parser.add_argument(
        "--interval", type=int, default=5, help="between checks, where their cost is measured"
    )
    parser.add_argument("--timeout", type=float, default=580.0, help="seconds until the ranks are ended")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md")
    parser.add_argument(
        "--output", type=Path, help="write the JSON document, raw times included, to this file"
    )
    parser.add_argument("--read", type=Path, help="print what this file of an earlier run holds")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="scout-benchmark-") as folder:
        plan = Plan(
            arguments.model,
            arguments.device,
            arguments.parallel,
            tuple(arguments.part or PARTS),
            arguments.rounds,
            arguments.steps,
            arguments.interval,
            Path(folder),
        )
        ranks = run_ranks(measure, RANKS, plan, timeout=arguments.timeout, backend=arguments.backend)
    report: dict[str, Any] = {
        **environment("torch", on_cuda=arguments.device == "cuda"),
        "job": {
            **{key: getattr(arguments, key) for key in ("model", "parallel", "backend", "interval")},
            "ranks": RANKS,
        },
        "ranks": ranks,
    }
    report["figures"] = summary(report)
    return report


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    preload("torch.nn.parallel", "torchscout.attach")
    main()
