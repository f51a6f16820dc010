"""What the hang observer costs a trainer, what it costs by itself, and how soon it has a verdict.

    python benchmarks/observer.py [--part NAME ...] [--json] [--output FILE]

A part is a function that returns figures; add one to ``PARTS`` and it is run, printed and written. A
figure with a ``goal`` says whether it is reached. Times are of single calls by the wall clock, cost of
reading the clock included, which is given too; a percentile is the median of those of several rounds,
so that a burst of somebody else's work does not pass for ours. ``ratio`` is to a reference timed in the
same run, call by call in turn: one ``struct.pack_into`` of the same size and the time that goes into it,
the least that any publication from Python can do.
"""

from __future__ import annotations

import itertools
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from large_round import scale
from reporting import environment, heading, parser_of, publish

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase
from torchscout.observer.record.writer import ProgressWriter
from torchscout.run.folder import Identity
from torchscout.run.reader import Stamped, read

ROUNDS = 11
"""The first one warms up."""
CALLS = 5_000
SHARED_MEMORY = Path("/dev/shm")

Figures = dict[str, dict[str, Any]]
"""What was measured -> its figures."""


def main() -> None:
    arguments = parser_of(__doc__, PARTS).parse_args()
    report = {"benchmark": "observer", **environment()}
    report["results"] = {name: PARTS[name]() for name in arguments.part or PARTS}
    publish(report, table, arguments)


def coordinate_publication() -> Figures:
    """A coordinate at a layer's boundary, and the end of a step."""
    with a_writer() as writer:
        phases = itertools.cycle([Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
        calls = {
            "advance": lambda: writer.advance(next(phases)),
            "next_step": writer.next_step,
        }
        return times_of(calls, goals={"advance": {"p50_us": 2.0, "p99_us": 10.0}})


def issue() -> Figures:
    """A collective's intent, as far as the record is concerned: its fingerprint is known already."""
    with a_writer() as writer:
        lines = itertools.cycle([writer.declare(CommGroup(key, tuple(range(64)), key)) for key in "abc"])
        phrase = writer.phrase("all_reduce float32[1048576] sum", 0xFEED_5EED_0123_4567)
        calls = {
            "issue": lambda: writer.issue(next(lines), phrase),
            **{
                f"issue, splits of {members}": lambda splits=tuple(range(members)): writer.issue(
                    next(lines), phrase, splits, splits
                )
                for members in (8, 64)
            },
        }
        return times_of(calls, goals={"issue": {"p50_us": 5.0}})


def collective_intent() -> Figures:
    """A one-rank Gloo all-reduce, bare and with its intent published, block by block in turn."""
    import torch
    import torch.distributed as dist

    from torchscout.collectives.interceptor import listen, uninstall
    from torchscout.observer.publisher import Publisher

    torch.set_num_threads(1)
    tensor = torch.ones(1024)
    with tempfile.TemporaryDirectory() as folder, a_writer() as writer:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        times: dict[str, list[float]] = {"bare": [], "published": []}
        for _ in range(ROUNDS):
            times["bare"].append(block(lambda: dist.all_reduce(tensor)))
            with listen(Publisher(writer)):
                times["published"].append(block(lambda: dist.all_reduce(tensor)))
            uninstall()
        dist.destroy_process_group()
    bare, published = (statistics.median(values[1:]) for values in times.values())
    added = {"p50_us": round(published - bare, 2), "of_a_bare_call": round((published - bare) / bare, 2)}
    goal = {"of_a_bare_call": 0.75}
    reached = added["of_a_bare_call"] <= goal["of_a_bare_call"]
    return {
        "bare all_reduce": {"p50_us": round(bare, 2)},
        "published": {"p50_us": round(published, 2)},
        "added": {**added, "goal": goal, "reached": reached},
    }


def block(call: Callable[[], object], calls: int = 1000) -> float:
    """The median call, in microseconds."""
    return statistics.median(timed(call) for _ in range(calls)) / 1e3


def idle_observer() -> Figures:
    """An observer that watches a trainer which moves; no job, hence no hub to talk to."""
    from torchscout.observer.handle import launch
    from torchscout.observer.spec import ObserverSpec

    with a_writer() as writer, tempfile.TemporaryDirectory() as run_dir:
        observer = launch(
            ObserverSpec(
                rank=0,
                size=2,
                record=str(writer.path),
                run=Identity(str(run_dir)),
                token="benchmark" * 4,
                config=ObserverConfig(),
            )
        )
        observer.configure([("127.0.0.1", 9)])  # nobody listens there
        time.sleep(2)
        begin, spent = time.monotonic(), cpu_seconds(observer.pid)
        while time.monotonic() - begin < 20:
            writer.advance(Phase.FORWARD)
            time.sleep(0.05)
        share = (cpu_seconds(observer.pid) - spent) / (time.monotonic() - begin)
        memory = resident_mib(observer.pid)
        assert observer.is_running
        writer.finished()
        observer.close()
    figures = {"core_percent": round(100 * share, 2), "resident_mib": round(memory, 1)}
    goal = {"core_percent": 1.0, "resident_mib": 40.0}
    reached = all(figures[name] <= limit for name, limit in goal.items())
    return {"idle observer": {**figures, "goal": goal, "reached": reached}}


def verdict() -> Figures:
    """From the moment silence is too long to the incident on disk: 16 ranks, each with its observer.

    The trainers are records that this process writes. Time and again one rank stops before a
    collective that the others have issued, another one each time, and then goes on.
    """
    config = ObserverConfig(min_silence_seconds=1.0, address="127.0.0.1")
    seconds, named = [], 0
    with a_job(16, config) as (trainers, incidents):
        for turn in range(10):
            for _ in range(30):
                for trainer in trainers:
                    trainer.step()
                time.sleep(0.01)
            late = 5 * turn % len(trainers)
            begin = time.monotonic()
            for rank, trainer in enumerate(trainers):
                trainer.begin_step(joins=rank != late)
            incident = line_of(incidents, 2 * turn)
            # A step of ten milliseconds leaves the floor as the threshold.
            seconds.append(incident.monotonic - begin - config.min_silence_seconds)
            named += incident.item.ranks == (late,)
            for trainer in trainers:
                trainer.step()
            line_of(incidents, 2 * turn + 1)  # that it has ended
    figures = {"median_s": round(statistics.median(seconds), 3), "worst_s": round(max(seconds), 3)}
    goal = {"median_s": 1.0, "worst_s": 3.0, "named_rightly": len(seconds)}
    in_time = figures["median_s"] <= goal["median_s"] and figures["worst_s"] <= goal["worst_s"]
    reached = in_time and named == len(seconds)
    return {"verdict, 16 ranks": {**figures, "named_rightly": named, "goal": goal, "reached": reached}}


class Trainer:
    """One rank's record, moved by hand."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.writer = ProgressWriter.create(directory, rank)
        self._line = self.writer.declare(CommGroup("world", tuple(range(size)), "world"))
        self._phrase = self.writer.phrase("all_reduce float32[8] sum", 7)
        self._has_joined = False

    def begin_step(self, *, joins: bool) -> None:
        """``joins`` the collective, or stops before it."""
        self.writer.advance(Phase.FORWARD)
        if joins:
            self.writer.issue(self._line, self._phrase)
        self._has_joined = joins

    def step(self) -> None:
        """A whole one, or what is left of it."""
        if not self._has_joined:
            self.begin_step(joins=True)
        self.writer.next_step()
        self._has_joined = False


@contextmanager
def a_job(size: int, config: ObserverConfig) -> Iterator[tuple[list[Trainer], Path]]:
    """Trainers with observers that have found each other, and the file of their incidents."""
    from torchscout.mesh import Mesh
    from torchscout.observer.handle import launch
    from torchscout.observer.spec import ObserverSpec, describe_mesh, hub_ranks

    hubs, mesh = hub_ranks([None] * size), describe_mesh(Mesh.grid(replica=size))
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=base) as records,
        tempfile.TemporaryDirectory() as run_dir,
        ExitStack() as undo,
    ):
        trainers = [Trainer(Path(records), rank, size) for rank in range(size)]
        observers = []
        for rank, trainer in enumerate(trainers):
            assignment = ObserverSpec(
                rank=rank,
                size=size,
                record=str(trainer.writer.path),
                run=Identity(str(run_dir)),
                token="benchmark" * 4,
                config=config,
                hub=hubs.index(rank) if rank in hubs else None,
                mesh=mesh if rank in hubs else None,
            )
            observers.append(launch(assignment))
            undo.callback(observers[-1].close)
            undo.callback(trainer.writer.finished)
        for observer in observers:
            observer.configure([("127.0.0.1", observers[rank].port) for rank in hubs])
        yield trainers, Path(run_dir) / "incidents" / "observer-0.jsonl"


def line_of(path: Path, number: int) -> Stamped:
    """That line of a file, once it is there. Hundreds of observers on a few cores take their time."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        # Counted first: to parse a line for hundreds of ranks takes a core from the observers.
        if path.exists() and path.read_bytes().count(b"\n") > number:
            return list(read(path))[number]
        time.sleep(0.005)
    raise AssertionError(f"{path} has no line {number} after 120 s")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


PARTS: dict[str, Callable[[], Figures]] = {
    "coordinate publication": coordinate_publication,
    "issue": issue,
    "collective intent": collective_intent,
    "idle observer": idle_observer,
    "verdict": verdict,
    "scale": scale,
}


@contextmanager
def a_writer() -> Iterator[ProgressWriter]:
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        writer = ProgressWriter.create(Path(directory), rank=0)
        yield writer
        writer.close()


def times_of(calls: dict[str, Callable[[], object]], goals: dict[str, dict[str, float]]) -> Figures:
    """Percentiles of each call; calls, reference and the bare clock take turns."""
    every = {**calls, "reference": a_bare_store(), "clock": None}
    rounds = [one_round(every) for _ in range(ROUNDS)][1:]
    figures = {
        name: {
            "p50_us": round(statistics.median(each[name][0] for each in rounds), 3),
            "p99_us": round(statistics.median(each[name][1] for each in rounds), 3),
            "ratio": round(statistics.median(each[name][0] / each["reference"][0] for each in rounds), 2),
        }
        for name in every
    }
    for name, goal in goals.items():
        reached = all(figures[name][percentile] <= limit for percentile, limit in goal.items())
        figures[name] |= {"goal": goal, "reached": reached}
    return figures


def one_round(calls: dict[str, Callable[[], object] | None]) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile of each, in microseconds."""
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(CALLS):
        for name, call in calls.items():
            samples[name].append(timed(call))
    cuts = {name: statistics.quantiles(values, n=100) for name, values in samples.items()}
    return {name: (cut[49] / 1e3, cut[98] / 1e3) for name, cut in cuts.items()}


def timed(call: Callable[[], object] | None) -> int:
    if call is None:
        begin = time.perf_counter_ns()
        return time.perf_counter_ns() - begin
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def a_bare_store() -> Callable[[], object]:
    store, memory, numbers = struct.Struct("6qdq").pack_into, memoryview(bytearray(64)), itertools.count()
    return lambda: store(memory, 0, next(numbers), 2, 3, 4, 5, 6, time.monotonic(), 8)


def table(report: dict[str, Any]) -> str:
    lines = [heading(report)]
    for part, figures in report["results"].items():
        lines += ["", part]
        lines += [f"  {name:22} {row(values)}" for name, values in figures.items()]
    return "\n".join(lines)


def row(values: dict[str, Any]) -> str:
    plain = [f"{name} {value:<8}" for name, value in values.items() if name not in {"goal", "reached"}]
    if "goal" not in values:
        return " ".join(plain)
    goal = ", ".join(f"{name} {limit}" for name, limit in values["goal"].items())
    return " ".join([*plain, f"goal {goal}: {'reached' if values['reached'] else 'MISSED'}"])


if __name__ == "__main__":
    main()
