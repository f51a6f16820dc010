"""Simulates checks of kernels that do not repeat their numbers, and of ranks that are wrong now and then.

    python benchmarks/repeatability.py [--checks 10000] [--jobs 100] [--json] [--output FILE]

Every check runs the real decision (``torchscout.decision.repeatability``); only what the replays give is
drawn at random. The first table must have no rank named. When a surface is found not to repeat, which takes
it out of all later checks, another job begins: every check counted is one of a surface that is still
compared. The second table says in how many checks a rank that really is wrong is named.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from reporting import parser_of, publish

from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import (
    BIAS,
    CHANCE,
    MAX_REPLAYS,
    Repeatability,
    Repeated,
    SurfaceHistory,
)
from torchscout.decision.types import EvidenceRecord, Manifestation

PEERS = (3, 4, 5, 8, 16, 32, 64, 128)
SURFACE = "layer.0/grad_input"
AMONG = 60
"""Comparisons in a check of a Transformer: its chance is shared by all of them."""
_BATCH = 256

Rates = Callable[[np.random.Generator, int], np.ndarray]
"""For N peers, the probabilities of each rank's results: N x results; drawn anew for each job."""


def shared(*weights: float) -> Rates:
    """One distribution for all ranks."""
    row = np.array(weights) / np.sum(weights)
    return lambda _, peers: np.tile(row, (peers, 1))


def rare(rate: float, results: int = 2) -> Rates:
    """One usual result; all others together at this rate."""
    return shared(1 - rate, *[rate / (results - 1)] * (results - 1))


def biased(rate: float, results: int = 2) -> Rates:
    """The odds that a rank differs are up to ``BIAS`` times those of another; drawn anew for each job."""

    def rates(source: np.random.Generator, peers: int) -> np.ndarray:
        odds = rate / (1 - rate) * source.uniform(1 / BIAS, 1, peers)
        odds[source.integers(peers)] = rate / (1 - rate)
        others = odds / (1 + odds)
        rest = np.repeat(others[:, None] / (results - 1), results - 1, axis=1)
        return np.concatenate([1 - others[:, None], rest], axis=1)

    return rates


def drawn(results: int, sharpness: float) -> Rates:
    """Any distribution at all: drawn from a Dirichlet for each job, sharper with smaller numbers."""
    return lambda source, peers: np.tile(source.dirichlet([sharpness] * results), (peers, 1))


KERNELS: dict[str, Rates] = {
    **{f"uniform, {results} results": shared(*[1] * results) for results in (2, 3, 8, 64)},
    **{f"one result at {rate:g}": rare(rate) for rate in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)},
    "63 results at 0.01": rare(1e-2, 64),
    "geometric, 64 results": shared(*(2.0**-place for place in range(64))),
    "steep geometric, 8 results": shared(*(20.0**-place for place in range(8))),
    "Zipf, 64 results": shared(*(1 / place for place in range(1, 65))),
    "steep Zipf, 64 results": shared(*(place**-4.0 for place in range(1, 65))),
    "any, 2 results": drawn(2, 0.3),
    "any, 16 results": drawn(16, 0.05),
    **{f"biased by rank, {rate:g}": biased(rate) for rate in (0.5, 1e-1, 1e-2, 1e-3)},
    "biased by rank, 0.1, 64 results": biased(1e-1, 64),
}


class Replays:
    """What peers compute, replay after replay."""

    def __init__(self, rates: np.ndarray, source: np.random.Generator) -> None:
        self._sums, self._source = np.cumsum(rates, axis=1), source
        self._rows: Iterator[list[int]] = iter(())
        self._batch = 4

    def next(self) -> list[int]:
        row = next(self._rows, None)
        if row is None:
            shape = (self._batch, self._sums.shape[0], 1)
            found = (self._source.random(shape) > self._sums[None, :, :-1]).sum(axis=2)
            self._rows, self._batch = iter(found.tolist()), _BATCH
            row = next(self._rows)
        return row


def check(history: SurfaceHistory, replays: Replays, among: int) -> Repeated | None:
    """One check of one surface; None if all agree at once."""
    values = replays.next()
    if values.count(values[0]) == len(values):
        return None
    record = EvidenceRecord(
        step=0,
        surface=SURFACE,
        manifestation=Manifestation.SDC,
        peers=tuple(range(len(values))),
        verdict=exact(values),
        mode="backward",
    )
    trial = history.trial(record, among=among, is_held=False)
    while trial.is_open:
        trial.observe(record.peers, replays.next())
    return history.conclude(trial)


@dataclass(slots=True)
class Tally:
    """What became of the checks of one kernel among so many peers."""

    kernel: str
    peers: int
    checks: int = 0
    named: int = 0
    groups: int = 0
    """Incidents that name nobody."""
    undecided: int = 0
    left_out: int = 0
    """Jobs that found out that it does not repeat."""
    replays: list[int] = field(default_factory=list)
    """Of each check in which peers differed."""

    def document(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("kernel", "peers", "checks", "named", "groups")},
            **{name: getattr(self, name) for name in ("undecided", "left_out")},
            "differing": len(self.replays),
            "replays_mean": statistics.fmean(self.replays) if self.replays else None,
        }


def kernel(name: str, peers: int, checks: int, seed: int) -> Tally:
    source = np.random.default_rng([seed, peers, sorted(KERNELS).index(name)])
    tally = Tally(name, peers)
    history, replays = SurfaceHistory(), Replays(KERNELS[name](source, peers), source)
    for _ in range(checks):
        tally.checks += 1
        found = check(history, replays, among=1)
        if found is None:
            continue
        tally.replays.append(found.replays)
        tally.named += bool(found.record.ranks)
        tally.groups += found.record.scope is not None and not found.record.ranks
        tally.undecided += found.kind is Repeatability.UNDECIDED
        if found.kind is not Repeatability.UNDECIDED:
            tally.left_out += found.kind is Repeatability.NONDETERMINISTIC
            history, replays = SurfaceHistory(), Replays(KERNELS[name](source, peers), source)
    return tally


def wrong_rank(rate: float, peers: int, jobs: int, seed: int) -> dict[str, object]:
    """A rank that is wrong in this share of its replays, another result each time; a kernel that repeats."""
    source = np.random.default_rng([seed, peers, round(1 / rate)])
    needed, replayed, others = [], [], 0
    for _ in range(jobs):
        rates = np.zeros((peers, 65))
        rates[:, 0] = 1.0
        rates[1] = [1 - rate, *[rate / 64] * 64]
        history, replays, total = SurfaceHistory(), Replays(rates, source), 0
        for count in range(1, math.ceil(20_000 / rate)):
            found = check(history, replays, AMONG)
            total += 0 if found is None else found.replays - 1
            if found is not None and found.record.scope is not None:
                others += found.record.ranks != (1,)
                needed.append(count)
                replayed.append(total)
                break
    return {
        "rate": rate,
        "peers": peers,
        "jobs": jobs,
        "named": len(needed) - others,
        "others_named": others,
        "checks_median": statistics.median(needed),
        "checks_p95": sorted(needed)[math.ceil(0.95 * len(needed)) - 1],
        "replays_median": statistics.median(replayed),
    }


def _table(rows: Sequence[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(str(each) for each in row) + " |" for row in rows)


def _kernels_table(tallies: Sequence[Tally]) -> str:
    names = dict.fromkeys(each.kernel for each in tallies)
    lines: list[list[object]] = [
        ["kernel", "checks", "rank named", "peers said to differ", "undecided", "replays after a difference"],
        ["---"] * 6,
    ]
    for name in names:
        found = [each for each in tallies if each.kernel == name]
        replays = [count for each in found for count in each.replays]
        mean = f"{statistics.fmean(replays):.1f}" if replays else "-"
        sums = [
            sum(getattr(each, key) for each in found) for key in ("checks", "named", "groups", "undecided")
        ]
        lines.append([name, *(f"{each:,}" for each in sums), mean])
    return _table(lines)


def _wrong_table(rows: Sequence[dict[str, object]]) -> str:
    lines: list[list[object]] = [
        ["peers", "wrong in", "jobs", "named", "another named", "checks, median (95%)", "replays, median"],
        ["---"] * 7,
    ]
    for each in rows:
        often = f"1 of {round(1 / float(str(each['rate'])))}"
        checks = f"{each['checks_median']:g} ({each['checks_p95']})"
        lines.append(
            [
                each["peers"],
                often,
                each["jobs"],
                each["named"],
                each["others_named"],
                checks,
                each["replays_median"],
            ]
        )
    return _table(lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--checks", type=int, default=10_000, help="of each kernel, for each number of peers")
    parser.add_argument(
        "--jobs", type=int, default=100, help="with a wrong rank, for each rate and number of peers"
    )
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begin = time.perf_counter()
    tallies = [kernel(name, peers, asked.checks, asked.seed) for name in KERNELS for peers in asked.peers]
    wrong = [
        wrong_rank(rate, peers, asked.jobs, asked.seed)
        for peers in asked.peers
        for rate in (1.0, 1 / 2, 1 / 10, 1 / 100)
    ]
    took = time.perf_counter() - begin
    report = {
        "benchmark": "repeatability",
        "chance": CHANCE,
        "bias": BIAS,
        "max_replays": MAX_REPLAYS,
        "peers": list(asked.peers),
        "seconds": round(took, 1),
        "kernels": [each.document() for each in tallies],
        "wrong_ranks": wrong,
    }
    tables = f"{_kernels_table(tallies)}\n\n{_wrong_table(wrong)}\n\npeers {list(asked.peers)}, {took:.0f} s"
    publish(report, lambda _: tables, asked)
    return 1 if any(each.named for each in tallies) or any(each["others_named"] for each in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
