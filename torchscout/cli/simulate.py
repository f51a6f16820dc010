"""``scout simulate``: random faults in a job of any size, decided by the product's own functions."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchscout.cli.console import AsJson, Output, print_report, refusing

if TYPE_CHECKING:
    from torchscout.simulate.runner import Decided

__all__ = ["simulate"]

_EVERY = 100


def simulate(
    layout: Annotated[
        str,
        typer.Option(
            help="llama3-405b, megascale, megatron-1t, megascale-moe, deepseek-v3, or TPxPPxDP[xEP]."
        ),
    ] = "llama3-405b",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="The number of ranks, by more or fewer replicas.")
    ] = None,
    scenarios: Annotated[int, typer.Option(min=1, help="How many scenarios to decide.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random scenarios.")] = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Decide random faults in a job on paper, of up to 131,072 ranks, and compare with the truth.

    A run that is interrupted or terminated reports the scenarios that it has decided until then.
    The exit status is 1 if wrong decisions are more frequent than 0.1%, or a healthy rank was named alone.
    """
    from torchscout.simulate.layouts import layout_of
    from torchscout.simulate.runner import report_of

    with refusing("--layout, --ranks"):
        chosen = layout_of(layout, ranks)

    def show(decided: Decided) -> None:
        if decided.index % _EVERY == _EVERY - 1:
            print(f"{decided.index + 1} of {scenarios} scenarios", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C: a partial report is printed
    report = report_of(chosen, scenarios, seed, show)
    print_report(report, _screen(report), as_json=as_json, output=output)
    goals = report["goals"]
    raise typer.Exit(0 if goals["wrong_rate"] and goals["healthy_named_alone"] else 1)


def _screen(report: dict[str, Any]) -> str:
    lines = [
        (
            f"{report['layout']}: {report['ranks']:,} ranks ({report['degrees']}), "
            f"{report['scenarios']:,} scenarios, seed {report['seed']}"
            f"{' (interrupted)' if report['interrupted'] else ''}"
        ),
        "",
    ]
    for outcome in ("right", "wrong", "inconclusive"):
        low, high = report[f"{outcome}_interval"]
        rate = report[f"{outcome}_rate"]
        lines.append(
            f"  {outcome:13} {100 * rate:7.2f}%   (95% interval {100 * low:.2f} to {100 * high:.2f}%)"
        )
    seconds, sizes = report["seconds"], report["bytes"]
    lines += [
        "",
        (
            f"  healthy ranks named alone: {report['healthy_named_alone']}; "
            f"healthy machines replaced: {report['healthy_replaced']}"
        ),
        f"  a round is decided in {seconds['median']:.3f} s (p99 {seconds['p99']:.3f} s) of processor time",
        (
            f"  memory {report['memory_bytes'] / 2**20:,.0f} MiB; "
            f"{sizes['observer']:,} bytes per observer, {sizes['hub'] / 2**20:,.1f} MiB at the hub"
        ),
        "",
        f"  {'family':18} {'right':>6} {'wrong':>6} {'inconclusive':>13}",
    ]
    for family, counts in report["families"].items():
        found = [counts.get(each, 0) for each in ("right", "wrong", "inconclusive")]
        lines.append(f"  {family:18} {found[0]:6} {found[1]:6} {found[2]:13}")
    for each in report["not_right"]:
        if each["outcome"] == "wrong":
            where = f"{each['scenario']} ({each['family']}, {each['condition']})"
            lines.append(f"  wrong in scenario {where}: {each['sentence']}")
    return "\n".join(lines)
