"""How long it takes, and how much memory, to form all peer groups of a very large job.

    python benchmarks/mesh.py [--json] [--output FILE]

``ratio`` is against the least that any answer costs: building the list of tuples of ranks from ready arrays.
"""

from __future__ import annotations

import resource
import time

from reporting import parser_of, publish

from torchscout.mesh import Mesh

JOBS = {
    "131,072 ranks, 1,024 groups of 128": {"replica": 128, "shard": 8, "tensor": 8, "pipeline": 16},
    "131,072 ranks, 65,536 groups of 2": {"replica": 2, "shard": 512, "tensor": 8, "pipeline": 16},
}


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    report = {"benchmark": "mesh", "results": [measure(name, degrees) for name, degrees in JOBS.items()]}
    report["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    publish(report, table, arguments)


def measure(name: str, degrees: dict[str, int]) -> dict[str, object]:
    begin = time.perf_counter()
    mesh = Mesh.grid(**degrees)
    groups = mesh.peer_groups()
    formed = time.perf_counter() - begin
    begin = time.perf_counter()
    least = mesh.groups_along(mesh.peer_axis())  # sorted already: only the tuples are built
    floor = time.perf_counter() - begin
    assert len(least) == len(groups)
    return {"job": name, "seconds": round(formed, 3), "ratio": round(formed / floor, 1)}


def table(report: dict) -> str:
    rows = [f"{row['job']:<38} {row['seconds']:6.3f} s  {row['ratio']:5.1f}x" for row in report["results"]]
    return "\n".join([*rows, f"peak memory of the process {report['peak_mib']} MiB"])


if __name__ == "__main__":
    main()
