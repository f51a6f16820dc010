"""The paper's table of MoE catalogs, on this device: how few shapes stand for all admitted ones.

    python benchmarks/moe_catalog.py [--configuration NAME ...] [--most N] [--json] [--output FILE]

For each configuration every admitted shape is executed three times and must do the same each time; the
fewest shapes that cover the others are selected, once by pressure regime and once by exact waves; the cover
is checked shape by shape; every work item of the selected shapes is perturbed inside the kernel, one at a
time, and must change a result; and the campaign is repeated and must select the same. ``--most`` bounds the
perturbations of each pass of each selected shape of the large projections, evenly spread; those of 128x128
are perturbed exhaustively.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

from reporting import environment, heading, parser_of, publish

from torchscout.experts.coverage import (
    Rows,
    ShapeProfile,
    check_cover,
    known,
    minimum_cover,
    uniform,
    unknown,
)
from torchscout.experts.discovery import discover
from torchscout.experts.kernel.perturbation import qualify
from torchscout.experts.kernel.profiler import KernelProfiler, Regime


class Configuration(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    first: int
    """The fewest rows of an expert."""
    last: int
    paper: int
    """Shapes that the paper selected."""

    @property
    def shapes(self) -> list[Rows]:
        return [uniform(rows, self.experts) for rows in range(self.first, self.last + 1)]

    @property
    def is_small(self) -> bool:
        return self.hidden == self.intermediate == 128


CONFIGURATIONS = {
    "128x128": Configuration(128, 128, 1, 0, 3456, 16),
    "6144x10752": Configuration(6144, 10752, 1, 1, 2048, 10),
    "5120x1536": Configuration(5120, 1536, 1, 1, 1024, 18),
    "2048x1024": Configuration(2048, 1024, 1, 1, 2048, 19),
    "2 experts": Configuration(128, 128, 2, 1, 2048, 18),
    "4 experts": Configuration(128, 128, 4, 1, 2048, 27),
    "8 experts": Configuration(128, 128, 8, 1, 2048, 42),
    "16 experts": Configuration(128, 128, 16, 1, 2048, 48),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--configuration", action="append", choices=list(CONFIGURATIONS), help="only this one"
    )
    parser.add_argument("--most", type=int, default=400, help="perturbations of a pass of a large shape")
    arguments = parser.parse_args()
    chosen = arguments.configuration or CONFIGURATIONS
    report: dict[str, Any] = {
        **environment("torch", "triton", on_cuda=True),
        "results": {},
    }
    for name in chosen:
        report["results"][name] = campaign(CONFIGURATIONS[name], arguments.most)
        print(f"{name}: {report['results'][name]}", file=sys.stderr, flush=True)
    publish(report, table, arguments)


def campaign(
    configuration: Configuration, most: int, *, device: str = "cuda", programs: int | None = None
) -> dict[str, Any]:
    """One line of the table."""
    begin = time.perf_counter()
    profiler = _profiler(configuration, "pressure", device, programs)
    profiles, unstable = _profiled(profiler, configuration)
    profiled_in = time.perf_counter() - begin
    selected = minimum_cover(profiles)
    check = check_cover(profiles, selected)
    again = minimum_cover(_profiled(_profiler(configuration, "pressure", device, programs), configuration)[0])
    strict, _ = _profiled(_profiler(configuration, "waves", device, programs), configuration)
    by_waves = minimum_cover(strict)
    begin = time.perf_counter()
    found = qualify(profiler.projection, selected, most=None if configuration.is_small else most)
    admitted = len(configuration.shapes)
    return {
        "admitted": admitted,
        "selected": len(selected) + len(unstable),
        "paper": configuration.paper,
        "reduction": f"{1 - (len(selected) + len(unstable)) / admitted:.2%}",
        "selected_by_waves": len(by_waves),
        "unstable": len(unstable),
        "covered": check.complete and not check.redundant,
        "occurrences": check.occurrences,
        "occurrences_covered": check.covered,
        "covered_by_waves": check_cover(strict, by_waves).complete,
        "injected": found.injected,
        "fired": found.fired,
        "changed": found.changed,
        "injected_all": configuration.is_small,
        "unaccounted": found.unaccounted,
        "missed": None if found.missed is None else str(found.missed),
        "same_again": again == selected,
        "seconds_to_profile": round(profiled_in, 1),
        "seconds_to_inject": round(time.perf_counter() - begin, 1),
        "rows": [rows[0] for rows in selected],
        "rows_by_waves": [rows[0] for rows in by_waves],
    }


def _profiler(
    configuration: Configuration, regime: Regime, device: str, programs: int | None
) -> KernelProfiler:
    hidden, intermediate, experts, *_ = configuration
    return KernelProfiler(hidden, intermediate, experts, device=device, regime=regime, programs=programs)


def _profiled(
    profiler: KernelProfiler, configuration: Configuration
) -> tuple[dict[Rows, ShapeProfile], dict[Rows, str]]:
    """The profiles of all admitted shapes, and those that have none."""
    seen = discover(profiler, reversed(configuration.shapes))  # the largest first, which all buffers then fit
    return known(seen), unknown(seen)


def table(report: dict[str, Any]) -> str:
    heads = (
        "admitted", "selected", "paper", "reduction", "selected_by_waves", "covered", "occurrences_covered",
        "injected", "changed", "same_again", "seconds_to_profile", "seconds_to_inject",
    )  # fmt: skip
    lines = [heading(report), ""]
    lines.append(" ".join(["configuration".ljust(13), *(head.rjust(max(9, len(head))) for head in heads)]))
    for name, row in report["results"].items():
        cells = (str(row[head]).rjust(max(9, len(head))) for head in heads)
        lines.append(" ".join([name.ljust(13), *cells]))
    for name, row in report["results"].items():
        lines.append(f"{name}: rows {row['rows']}; by waves {row['rows_by_waves']}")
        if row["unaccounted"] or row["missed"]:
            lines.append(f"{name}: missed {row['missed']}; {row['unaccounted'][:3]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
