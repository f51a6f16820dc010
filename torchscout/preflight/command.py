"""``torchrun ... -m torchscout.preflight``: one rank from its start to its exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchscout.errors import ScoutError
from torchscout.preflight.page import page
from torchscout.preflight.report import Conclusion, Coverage, Report
from torchscout.preflight.runner import SECONDS, Preflight
from torchscout.preflight.workload import Workload
from torchscout.utils.text import named, sentences

__all__ = ["Options", "deliver", "join", "leave", "main", "options_in"]

START_SECONDS = 120.0
"""How long ranks wait for each other when they start."""
_WRITING_SECONDS = 3.0
"""After a hang, how long a rank that writes no report stays: the launcher ends all others when one exits."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one rank."""

    seconds: float = SECONDS
    output: Path | None = None
    run_dir: Path | None = None
    as_json: bool = False
    quiet: bool = False
    """Write the report to ``output`` only, and exit with 0 unless a rank hangs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank, and exit with 0 (healthy), 1 (something is named) or 2 (undecided)."""
    options = options_in(arguments)
    if "RANK" not in os.environ:
        print("Error: start a preflight with torchrun ... -m torchscout.preflight", file=sys.stderr)
        raise SystemExit(Conclusion.UNDECIDED.exit_code)
    device = _device()
    try:
        join(device, START_SECONDS)
        preflight = Preflight(
            Workload(device),
            seconds=options.seconds,
            run_dir=options.run_dir,
            on_hang=partial(leave, options),
        )
        report = preflight.run()
    except ScoutError as error:
        report = _could_not_run(str(error))
        deliver(report, options, [int(os.environ["RANK"])])
        raise SystemExit(Conclusion.UNDECIDED.exit_code) from error
    deliver(report, options, [])
    dist.barrier()  # torchrun ends all ranks when the first exits with an error
    dist.destroy_process_group()
    raise SystemExit(0 if options.quiet else report.conclusion.exit_code)


def options_in(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m torchscout.preflight",
        description="Test the devices, machines and links of a job before it starts. Exit status: 0 if "
        "nothing was found, 1 if a rank, machine or link is named, 2 if nothing could be decided.",
    )
    parser.add_argument("--seconds", type=_positive, default=SECONDS, help="how long to repeat the work")
    parser.add_argument("--output", type=Path, help="write the report to this file, as JSON")
    parser.add_argument("--run-dir", type=Path, help="a folder for the evidence")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing, for scout preflight")
    return Options(**vars(parser.parse_args(arguments)))


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def join(device: torch.device, seconds: float) -> None:
    """Wait until all ranks have started, and connect them.

    Raises ``ScoutError`` with the ranks that have not started after ``seconds``.
    """
    limit = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    deadline = time.monotonic() + seconds
    store.set(f"preflight/rank/{rank}", b"started")
    store.add("preflight/started", 1)
    while store.add("preflight/started", 0) < size:
        if time.monotonic() > deadline:
            missing = [each for each in range(size) if not store.check([f"preflight/rank/{each}"])]
            raise ScoutError(f"{named(missing)} did not start within {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    groups = dist.PrefixStore("preflight/groups", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size)


def leave(options: Options, report: Report) -> None:
    """After a hang: deliver the report from ranks that can still do so, and end this process."""
    hung = [rank for each in report.incidents if each.manifestation.stops_job for rank in each.ranks]
    if len(hung) >= len(report.devices):
        hung = []
    if not deliver(report, options, hung):
        time.sleep(_WRITING_SECONDS)
    os._exit(report.conclusion.exit_code or Conclusion.UNDECIDED.exit_code)


def deliver(report: Report, options: Options, silent: Sequence[int]) -> bool:
    """Let the first rank print the report, and the first rank of each machine write it.

    ``silent`` ranks are left out. Returns whether this rank did any of it.
    """
    rank = int(os.environ["RANK"])
    able = [each for each in report.devices if each.rank not in silent]
    first = {each.host: each.rank for each in reversed(able)}
    document = json.dumps(report.to_json(), indent=2)
    is_writer = rank in first.values() or not able
    if is_writer and options.output is not None:
        part = options.output.with_name(f"{options.output.name}.{rank}")
        part.write_text(document + "\n")
        part.replace(options.output)  # machines may share a file system
    if not options.quiet and (not able or rank == able[0].rank):
        print(document if options.as_json else page(report.to_json()), flush=True)
    return is_writer


def _could_not_run(why: str) -> Report:
    return Report(Conclusion.UNDECIDED, (sentences(why),), (), (), Coverage(), 0.0, 0, None)
