"""Uneven routings of an expert kernel on this device: few templates that stand for all of them.

    python benchmarks/moe_routings.py [--tokens N] [--most N] [--json] [--output FILE]

Single experts and drawn routings are executed, the exact Pareto set of path counts over every routing is
derived from them and executed, templates that cover it are chosen and executed, and work items of every
template are perturbed inside the kernel, evenly spread, ``--most`` in each pass: each must change a result.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from reporting import environment, heading, parser_of, publish

from torchscout.cli.discover.plan import kernel_loads
from torchscout.experts.discovery import Executions
from torchscout.experts.kernel.perturbation import qualify
from torchscout.experts.kernel.profiler import KernelProfiler
from torchscout.experts.templates import Routings, routed

KERNELS = {"128x128, 8 experts": (128, 128, 8), "2048x1024, 8 experts": (2048, 1024, 8)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="rows that the experts share")
    parser.add_argument("--most", type=int, default=200, help="perturbations of a pass of a template")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        **environment("torch", "triton", on_cuda=True),
        "tokens": arguments.tokens,
        "results": {},
    }
    for name, (hidden, intermediate, experts) in KERNELS.items():
        profiler = KernelProfiler(hidden, intermediate, experts)
        report["results"][name] = covered(profiler, Routings(experts, arguments.tokens), arguments.most)
        print(f"{name}: {report['results'][name]}", file=sys.stderr, flush=True)
    publish(report, table, arguments)


def covered(profiler: KernelProfiler, admitted: Routings, most: int) -> dict[str, Any]:
    begin = time.perf_counter()
    found = routed("routings", profiler.facts(), kernel_loads(), admitted, executions=Executions(profiler))
    seconds = time.perf_counter() - begin
    if found.table is None or found.additivity is None:
        return {"routings": _count(admitted), "reason": found.reason}
    begin = time.perf_counter()
    tried = qualify(profiler.projection, [each.rows for each in found.table.selected], most=most)
    return {
        "routings": _count(admitted),
        "adding up": len(found.additivity.adding),
        "by load": len(found.additivity.by_load),
        "pareto": found.pareto,
        "templates": len(found.table.selected),
        "at least": found.least,
        "injected": tried.injected,
        "changed": tried.changed,
        "seconds": round(seconds, 1),
        "seconds to inject": round(time.perf_counter() - begin, 1),
    }


def _count(admitted: Routings) -> str:
    return f"{math.comb(admitted.tokens + admitted.experts - 1, admitted.experts - 1):.1e}"


def table(report: dict[str, Any]) -> str:
    lines = [heading(report, f"{report['tokens']} rows"), ""]
    for name, row in report["results"].items():
        lines += [name, *(f"  {head:<22}{value}" for head, value in row.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
