"""How many bytes a job's run directory takes in a day, and how long ``scout report`` reads a large one.

    python benchmarks/records_scale.py [--real N] [--ranks N] [--json] [--output FILE]

``--real`` ranks train a small model on this machine with a check at every step; what a line of each file
takes is measured there. The rest is counting, for a healthy job of ``--ranks``: checks come every
``CHECKSECONDS``, a line has as many surfaces as in the small model, since a check replays one layer of
either, and lines are as frequent as ``SummaryRecorder`` writes them. Many peers make lines longer.

The run directory that the report reads is written by ``tests.support.large_run``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from observer import SHARED_MEMORY
from reporting import environment, parser_of, publish

from torchscout.config import ReplayConfig
from torchscout.run.writer import MOST_BYTES
from torchscout.session.replay.summary import CHECKS, SECONDS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS = 80
CHECKSECONDS = 100.0
"""A check at every 20th step of five seconds."""
DAY = 86_400
TENSOR_PIPELINE = 128
"""Ranks of one replica, as in TP8 PP16."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--real", type=int, default=4, help="real ranks")
    parser.add_argument("--ranks", type=int, default=16_384, help="ranks of the job that is extrapolated to")
    arguments = parser.parse_args()
    real = measure(arguments.real)
    report = {
        **environment(),
        "benchmark": "records",
        "real": real,
        "day": extrapolate(real, arguments.ranks),
        "report": read_large(arguments.ranks),
    }
    publish(report, lambda found: json.dumps(found, indent=2), arguments)


def train(rank: int, run_dir: str) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from torchscout.attach import enable_resiliency
    from torchscout.testing.transformer import Transformer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, replay=ReplayConfig(interval=1), run_dir=run_dir):
        for step in range(STEPS):
            tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            model(tokens).float().pow(2).mean().backward()
            optimizer.step()


def measure(ranks: int) -> dict[str, Any]:
    """Bytes of each kind of line, and of each file, in a healthy job of some real ranks."""
    from torchscout.testing.local_ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_ranks(train, ranks, str(run_dir), timeout=300)
        records = [json.loads(line) for line in (run_dir / "records/rank-1.jsonl").read_text().splitlines()]
        sizes = {
            str(path.relative_to(run_dir).parent if path.parent != run_dir else path.name): 0
            for path in sorted(run_dir.rglob("*"))
            if path.is_file()
        }
        for path in (path for path in run_dir.rglob("*") if path.is_file()):
            name = str(path.relative_to(run_dir).parent if path.parent != run_dir else path.name)
            sizes[name] += path.stat().st_size
        agreements = [each for each in records if each["kind"] == "agreements"]
        surfaces = [surface for each in agreements for surface in each["surfaces"]]
        keys = {(each["surface"], each["layer"], each["mode"]) for each in surfaces}
        return {
            "ranks": ranks,
            "checks": STEPS,
            "bytes": sizes,
            "lines": Counter(each["kind"] for each in records),
            "surfaces": len(keys),
            "surfaces_of_a_line": round(len(surfaces) / max(1, len(agreements))),
            "bytes_of_a_surface": round(
                sum(len(json.dumps(each)) for each in surfaces) / max(1, len(surfaces))
            ),
            "trust_bytes_of_a_check": round(sizes.get("history.jsonl", 0) / STEPS),
            "entry_bytes": round(sizes["ranks"] / ranks),
        }


def extrapolate(real: dict[str, Any], ranks: int) -> dict[str, Any]:
    """A healthy day of a large job, by counts."""
    checks = DAY / CHECKSECONDS
    between = min(CHECKS, SECONDS / CHECKSECONDS)
    peers = 7 * ranks // TENSOR_PIPELINE
    of_rank = checks / between * (real["surfaces_of_a_line"] * real["bytes_of_a_surface"] + peers)
    return {
        "ranks": ranks,
        "checks": round(checks),
        "records_of_a_rank": round(of_rank),
        "records": round(of_rank * ranks),
        "history": round(checks * real["trust_bytes_of_a_check"]),
        "roster": real["entry_bytes"] * ranks,
        "most_records_of_a_rank": 3 * MOST_BYTES,
        "most_records": 3 * MOST_BYTES * ranks,
        "days_until_then": round(3 * MOST_BYTES / of_rank, 1),
    }


def read_large(ranks: int) -> dict[str, Any]:
    """Seconds to read, and to write the page."""
    from tests.support.large_run import write_large_run
    from torchscout.report.comparisons import Comparisons
    from torchscout.report.document import document_of
    from torchscout.report.page import page
    from torchscout.report.standing import job_state
    from torchscout.run.reader import read_run

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        write_large_run(Path(folder), ranks)
        begin = time.perf_counter()
        run = read_run(Path(folder))
        read = time.perf_counter() - begin
        text = page(document_of(run, Comparisons.read(run), job_state(run)))
        return {
            "ranks": ranks,
            "read_s": round(read, 2),
            "page_s": round(time.perf_counter() - begin - read, 2),
            "page_bytes": len(text),
            "directory_bytes": sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()),
        }


if __name__ == "__main__":
    main()
