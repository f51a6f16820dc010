"""What is tried outside of the package: ``python -m evaluation --help``."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from evaluation.simulate.layouts import SMALL, layout_of
from evaluation.simulate.runner import Decided, report_of
from torchscout.cli.console import AsJson, Output, print_report, refusing

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
_EVERY = 100


@app.callback()
def main() -> None:
    """What is tried outside of the package."""


@app.command()
def simulate(
    layout: Annotated[
        str,
        typer.Option(
            help="llama3-405b, megascale, megatron-1t, megascale-moe, deepseek-v3, TPxPPxDP[xEP], or small: "
            "another job of 2 to 36 ranks for each scenario."
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
    with refusing("--layout, --ranks"):
        if layout == SMALL and ranks is not None:
            raise ValueError(f"{SMALL} draws the number of ranks for each scenario")
        chosen = None if layout == SMALL else layout_of(layout, ranks)

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
        f"{report['layout']}: {report['ranks']:,} ranks ({report['degrees']}), {report['scenarios']:,} scenarios, "
        f"seed {report['seed']}{' (interrupted)' if report['interrupted'] else ''}",
        "",
    ]
    for outcome in ("right", "wrong", "inconclusive"):
        rate, (low, high) = report[f"{outcome}_rate"], report[f"{outcome}_interval"]
        lines.append(
            f"  {outcome:13} {100 * rate:7.2f}%   (95% interval {100 * low:.2f} to {100 * high:.2f}%)"
        )
    seconds = report["seconds"]
    lines += [
        "",
        f"  healthy ranks named alone: {report['healthy_named_alone']}",
        f"  a round is decided in {seconds['median']:.3f} s (p99 {seconds['p99']:.3f} s, at most "
        f"{seconds['max']:.3f} s) of processor time",
        f"  memory {report['memory_bytes'] / 2**20:,.0f} MiB",
        "",
        f"  {'family':18} {'right':>6} {'wrong':>6} {'inconclusive':>13}",
    ]
    for family, counts in report["families"].items():
        found = [counts.get(each, 0) for each in ("right", "wrong", "inconclusive")]
        lines.append(f"  {family:18} {found[0]:6} {found[1]:6} {found[2]:13}")
    for each in report["not_right"]:
        if each["outcome"] == "wrong":
            where = f"{each['scenario']} ({each['family']}, {each['condition']}, {each['degrees']})"
            lines.append(f"  wrong in scenario {where}: {each['sentence']}")
    return "\n".join(lines)


if __name__ == "__main__":
    app(prog_name="python -m evaluation")
