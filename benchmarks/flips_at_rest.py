"""Bits that flip in state with one owner: which are reported, with which rank, and what watching costs.

    python benchmarks/flips_at_rest.py [--flips 200] [--seed 0] [--layouts fsdp2,hsdp,zero1,...]
        [--minutes M] [--part flips] [--part cost] [--json] [--output FILE]

``flips``: each job trains a very small model for 20 steps on four Gloo ranks, with a check at every fifth. In
one step, on one rank, one bit of what that rank holds changes between two updates, as memory does it: PyTorch
counts no write. Rank, step, moment in the step, kind of state, tensor, element and bit are drawn at random;
the kinds have equal shares. For a tenth as many jobs nothing changes, and nothing must be reported.

A flip is reported if an incident names its rank, or a group of replicas with it in which nobody can tell. It
is certified if the session's certified step, or a verified checkpoint, is of a state that the flip may have
reached. What it leaves behind is seen by comparing all state with that of a clean job, in the end: a flip in
a copy that the next update overwrites may leave nothing.

``cost``: steps of two FSDP2 ranks with about 75 MB of state each, without torchscout, with all of it watched,
and with a budget, in turn. On the CPU; what a GPU takes is not measured.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flip_parts.cost import cost
from flip_parts.flip import MOMENTS, Flip
from flip_parts.job import STEPS, Asked, Found, train_all
from flip_parts.layouts import LAYOUTS, RANKS
from flip_parts.verdict import Result, counted, judged
from reporting import environment, heading, parser_of, publish

from torchscout.testing.local_ranks import LiveRanks, preload

JOB_SECONDS = 240
_ORDER = ("weight", "master", "exp_avg", "exp_avg_sq", "working copy")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--flips", type=int, default=200, help="in all layouts together")
    parser.add_argument("--minutes", type=float, help="stop then; layouts get equal shares of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="separated by commas")
    parser.add_argument("--part", action="append", choices=["flips", "cost"], help="only this one")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        **environment("torch", "deepspeed", "megatron-core"),
        "seed": arguments.seed,
    }
    parts = arguments.part or ["flips", "cost"]
    if "flips" in parts:
        report["layouts"] = flips(
            arguments.layouts.split(","), arguments.flips, arguments.seed, arguments.minutes
        )
    if "cost" in parts:
        report["cost"] = cost()
    publish(report, table, arguments)


def flips(layouts: Sequence[str], number: int, seed: int, minutes: float | None = None) -> dict[str, Any]:
    """By layout."""
    found = {}
    for place, layout in enumerate(layouts):
        share = number // len(layouts) + (place < number % len(layouts))
        draw = random.Random(f"{seed} {layout}")
        plan: list[Flip | None] = [_drawn(draw) for _ in range(share)]
        for clean in range(max(2, share // 10)):  # two of them are compared with each other
            plan.insert(11 * clean, None)
        seconds = float("inf") if minutes is None else 60 * minutes / len(layouts)
        found[layout] = _measured(layout, plan, seconds)
    return found


def _drawn(draw: random.Random) -> Flip:
    return Flip(
        draw.randrange(RANKS), draw.randrange(1, STEPS + 1), draw.choice(MOMENTS), draw.getrandbits(32)
    )


def _measured(layout: str, plan: Sequence[Flip | None], seconds: float) -> dict[str, Any]:
    results, clean, broken = list[Result](), list[list[Found]](), list[str]()
    begin, ranks = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="scout-flips-") as folder:
        try:
            for number, flip in enumerate(plan):
                if time.monotonic() - begin > seconds:
                    break
                ranks = ranks or LiveRanks(train_all, RANKS, LAYOUTS[layout])
                try:
                    answers = ranks.ask(Asked(Path(folder) / str(number), flip), JOB_SECONDS)
                except AssertionError as error:  # of ranks: a job that did not come to its end
                    broken.append(f"{flip}: {error}")
                    ranks.close()
                    ranks = None
                    continue
                if flip is None:
                    clean.append(answers)
                else:
                    results.append(judged(layout, flip, answers, clean[0] if clean else ()))
                _say(layout, number, plan, results)
        finally:
            if ranks is not None:
                ranks.close()
    kinds = sorted({each.flipped.kind for each in results}, key=_ORDER.index)
    alarms = [seen for job in clean for each in job for seen in each.incidents]
    return {
        "kinds": {kind: counted([e for e in results if e.flipped.kind == kind]) for kind in kinds},
        "all": counted(results),
        "clean": {
            "jobs": len(clean),
            "alarms": sorted({each.sentence for each in alarms}),
            "failures": sorted({failure for job in clean for each in job for failure in each.failures}),
            "certified": [job[0].certified for job in clean],
            "are_equal": all([e.digest for e in job] == [e.digest for e in clean[0]] for job in clean),
        },
        "broken": broken,
        "seconds_per_job": round((time.monotonic() - begin) / max(1, len(results) + len(clean)), 2),
        "not_named": [asdict(e) for e in results if e.outcome in ("missed", "wrong") or e.is_certified],
        "every": [asdict(each) for each in results],
    }


def _say(layout: str, number: int, plan: Sequence[object], results: Sequence[Result]) -> None:
    print(f"\r{layout} {number + 1}/{len(plan)} {counted(results)}", end="", file=sys.stderr, flush=True)
    if number + 1 == len(plan):
        print(file=sys.stderr)


def table(report: dict[str, Any]) -> str:
    lines = [heading(report, f"seed {report['seed']}")]
    if "layouts" in report:
        head = ("layout", "what flips", "flips", "rank", "group", "wrong", "missed", "certified", "effect")
        lines += ["", "{:10} {:14}".format(*head) + "".join(f"{name:>10}" for name in head[2:])]
    for layout, found in report.get("layouts", {}).items():
        for kind, row in [*found["kinds"].items(), ("all", found["all"])]:
            lines.append(f"{layout:10} {kind:14}" + "".join(f"{number:10}" for number in row.values()))
        clean = found["clean"]
        lines.append(f"{'':10} {clean['jobs']} clean jobs, {len(clean['alarms'])} alarms")
        lines += [f"{'':10} {each}" for each in [*clean["alarms"], *clean["failures"], *found["broken"]]]
        lines += [f"{'':10} {_in_words(each)}" for each in found["not_named"]]
    for name, row in report.get("cost", {}).items():
        lines.append(f"{name:28} " + ", ".join(f"{key} {value}" for key, value in row.items()))
    return "\n".join(lines)


def _in_words(result: dict[str, Any]) -> str:
    flip, made = result["flip"], result["flipped"]
    where = f"rank {flip['rank']}, step {flip['step']} {flip['moment']}"
    what = f"bit {made['bit']} of {made['kind']} ({made['dtype']}, {made['was']:.3g} -> {made['became']:.3g})"
    effect = "" if result["has_effect"] else ", without effect"
    return f"{result['outcome']}, certified {result['certified']}: {where}, {what}{effect}"


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    preload("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "torchscout.attach")
    main()
