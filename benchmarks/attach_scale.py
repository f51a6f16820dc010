"""What ``enable_resiliency`` costs a rank, against the number of ranks: time, memory and bytes.

    python benchmarks/attach_scale.py [--simulated N ...] [--ranks N ...] [--json] [--output FILE]

``--simulated`` runs what one rank computes while it attaches to a job on paper, without a network: the mesh
and its peers, who hosts the hubs, what the observer is told, and the roster that all ranks exchange, which
passes a tree of groups. ``growth`` is the exponent between the smallest and the largest job: 1 is linear, 2
quadratic. Times are of the processor.

``--ranks`` attaches real processes over Gloo, with observers, on this machine. They share its cores, so that
the processor time of a rank says more than the seconds.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reporting import environment, parser_of, publish

from torchscout.c3.channel import decoded
from torchscout.c3.tree import FAN_OUT, Runs, groups_of
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.decision.progress import CommGroup
from torchscout.mesh import LayerKind, Mesh
from torchscout.observer.record.layout import Declarations, line_text
from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks, mesh_from

SIMULATED = (1_024, 16_384, 131_072)
RANKS = (2, 4, 8, 16)
LOCAL, PIPELINE = 8, 16
LINEAR = 1.25
"""The goal for ``growth``: sorting, and memory that no longer fits a cache, make it a little more than 1."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--simulated", type=int, nargs="*", default=SIMULATED, help="ranks of jobs on paper")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="numbers of real ranks")
    arguments = parser.parse_args()
    rows = [on_paper(size) for size in arguments.simulated]
    report = {
        **environment(),
        "benchmark": "attach",
        "simulated": rows,
        "growth": growth(rows),
        "ranks": [real(ranks) for ranks in arguments.ranks],
    }
    publish(report, table, arguments)


def on_paper(size: int) -> dict[str, Any]:
    """Seconds of the processor for each part; ``bytes`` of what ranks exchange and of the observer's spec."""
    hosts = [f"node-{rank // LOCAL:05}.cluster.example" for rank in range(size)]
    mesh = Mesh.grid(replica=size // LOCAL // PIPELINE, tensor=LOCAL, pipeline=PIPELINE, hosts=hosts)
    spec = ObserverSpec(
        rank=0,
        size=size,
        record="/dev/shm/record",
        run_dir="/runs/run",
        token="t" * 64,
        config=ObserverConfig(),
        hub=0,
        mesh=describe_mesh(mesh),
    )
    told = json.dumps(spec.to_json())
    gathered = roster(hosts)
    world = CommGroup("world", tuple(range(size)), "world")
    parts: dict[str, Callable[[], object]] = {
        "mesh": lambda: new_mesh(size, hosts),
        "own peers": lambda: peers(new_mesh(size, hosts), size - 1),
        "all peer groups": lambda: new_mesh(size, hosts).peer_groups(LayerKind.EXPERT),
        "digest of the mesh": mesh.summary,
        "who hosts hubs": lambda: hub_ranks(hosts),
        "roster joined, on rank 0": lambda: roster(hosts),
        "roster read": lambda: decoded(gathered.by_rank()),
        "spec of a hub's observer written": lambda: json.dumps(
            ObserverSpec.to_json(spec) | {"mesh": describe_mesh(mesh)}
        ),
        "spec read, with the mesh": lambda: mesh_from(ObserverSpec.from_json(json.loads(told)).mesh or {}),
        "world group written and read": lambda: Declarations(size).extend(line_text(world)),
    }
    return {
        "ranks": size,
        "seconds": {name: round(seconds_of(part), 5) for name, part in parts.items()},
        "bytes": {"roster": len(gathered.encode()), "spec of a hub's observer": len(told)},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def new_mesh(size: int, hosts: Sequence[str]) -> Mesh:
    return Mesh.grid(replica=size // LOCAL // PIPELINE, tensor=LOCAL, pipeline=PIPELINE).on(hosts)


def peers(mesh: Mesh, rank: int) -> list[object]:
    return [find(rank, role) for role in LayerKind for find in (mesh.peers_of, mesh.layer_peers_of)]


def roster(hosts: Sequence[str]) -> Runs:
    """What rank 0 has after the exchange of ``attach``, joined level by level as in the tree of groups."""
    device = "NVIDIA H200 (GPU-00000000-0000-0000-0000-000000000000)"
    own = json.dumps({"host": hosts[0], "device": device, "token": "t" * 64, "run_dir": "/runs/run"})
    runs = [Runs.of(own.encode())]
    # Devices of one kind differ in their identifiers: no two ranks send the same.
    runs += [
        Runs.of(json.dumps({"host": host, "device": f"{device[:-13]}{rank:012})"}).encode())
        for rank, host in enumerate(hosts[1:], 1)
    ]
    width = LOCAL
    for _ in groups_of(0, len(hosts), LOCAL):
        runs = [Runs.joined(runs[first : first + width]) for first in range(0, len(runs), width)]
        width = FAN_OUT
    (joined,) = runs
    return joined


def seconds_of(part: Callable[[], object], times: int = 3) -> float:
    """The fastest of some runs, by the processor's time."""
    found = []
    for _ in range(times):
        gc.collect()
        begin = time.process_time()
        part()
        found.append(time.process_time() - begin)
    return min(found)


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(rows) < 2:
        return {}
    first, last = rows[0], rows[-1]
    span = math.log(last["ranks"] / first["ranks"])
    exponents = {
        name: round(math.log(max(seconds, 1e-5) / max(first["seconds"][name], 1e-5)) / span, 2)
        for name, seconds in last["seconds"].items()
    }
    exponents |= {
        f"{name}, bytes": round(math.log(size / first["bytes"][name]) / span, 2)
        for name, size in last["bytes"].items()
    }
    return {**exponents, "goal": LINEAR, "reached": max(exponents.values()) <= LINEAR}


def attach(_rank: int, run_dir: str) -> dict[str, float]:
    """On one real rank: seconds, processor seconds and memory of attaching."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from torchscout.attach import enable_resiliency

    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    dist.barrier()
    before, memory = time.perf_counter(), resident_mib()
    cpu = time.process_time()
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(timeout_seconds=300.0),
        observer=ObserverConfig(),
        run_dir=run_dir,
    )
    found = {
        "seconds": time.perf_counter() - before,
        "cpu_s": time.process_time() - cpu,
        "mib": resident_mib() - memory,
    }
    dist.barrier()
    session.close()
    return found


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def real(ranks: int) -> dict[str, Any]:
    from torchscout.testing.local_ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(attach, ranks, str(Path(folder) / "run"), timeout=550)
    return {
        "ranks": ranks,
        "seconds": round(max(each["seconds"] for each in found), 2),
        **{name: round(statistics.median(each[name] for each in found), 3) for name in ("cpu_s", "mib")},
    }


def table(report: dict[str, Any]) -> str:
    rows, exponents = report["simulated"], report["growth"]
    lines = []
    if rows:
        lines.append(f"{'':36}" + "".join(f"{row['ranks']:>12,}" for row in rows) + "   growth")
        for name in rows[0]["seconds"]:
            cells = "".join(f"{1e3 * row['seconds'][name]:>9.1f} ms" for row in rows)
            lines.append(f"{name:36}{cells}   {exponents.get(name, '')}")
        for name in rows[0]["bytes"]:
            cells = "".join(f"{row['bytes'][name] / 1024:>8.0f} KiB" for row in rows)
            lines.append(f"{name:36}{cells}   {exponents.get(f'{name}, bytes', '')}")
        lines.append(
            f"{'peak memory of the process':36}" + "".join(f"{row['peak_mib']:>8} MiB" for row in rows)
        )
        if exponents:
            lines.append(f"goal {LINEAR}: {'reached' if exponents['reached'] else 'MISSED'}")
    lines += [
        f"{row['ranks']} real ranks: {row['seconds']} s, {row['cpu_s']} s of the processor and "
        f"{row['mib']} MiB for a rank"
        for row in report["ranks"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
