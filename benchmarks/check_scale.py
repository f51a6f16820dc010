"""The cost of one check against the number of ranks: training's time and CPU time on each rank.

``--ranks`` measures real processes over Gloo, with a tiny model: what a check adds to a step, and the CPU
time that it takes. On a machine with few cores the processes wait for each other, so that CPU time and its
ratio to the smallest job say more than the time of a step.

``--simulated`` runs what rank 0 and any other rank compute in a check of a larger job, without a network: the
payloads of all other ranks are made up, and arrive as those of the groups of a tree would.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from torchscout.c3 import compare as c3
from torchscout.c3.tree import Runs, TreeChannel, groups_of
from torchscout.config import BaselineConfig, ReplayConfig, StragglerConfig
from torchscout.decision.baseline import Stragglers
from torchscout.decision.timings import Timings
from torchscout.decision.types import Status
from torchscout.mesh import Axis, Mesh, PeerGroup
from torchscout.replay.recipe import Comparison, Lap, Measured, Mode
from torchscout.replay.verdicts import Context, judge
from torchscout.session.replay.time_comparison import decode, encode

STEPS = 8
LOCAL = 8
SURFACES = 40
"""Signatures of one check: outputs, gradients, updates and digests of all state."""
VOTES = np.zeros(12, "<i8").tobytes()
TIMES = ("time/module", "time/module_backward", "time/embedding", "time/output", "time/optimizer")


def on_rank(rank: int, width: int, run_dir: str) -> dict[str, float]:
    """Return seconds and CPU seconds of a step without and with a check."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from torchscout.attach import enable_resiliency

    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(width)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(steps: int) -> tuple[float, float]:
        began, cpu = time.perf_counter(), _cpu()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((4, 16), float(rank))).sum().backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (_cpu() - cpu) / steps

    train(3)
    plain = train(STEPS)
    replay = ReplayConfig(interval=1, timeout_seconds=300.0)
    with enable_resiliency(model, optimizer, replay=replay, observer=None, run_dir=run_dir) as session:
        train(3)
        checked = train(STEPS)
        if session.failures:
            raise RuntimeError(session.failures)
    return {"seconds": checked[0] - plain[0], "cpu": checked[1] - plain[1], "step": plain[0]}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured_with(ranks: int) -> dict[str, Any]:
    from torchscout.testing.local_ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(on_rank, ranks, LOCAL, str(Path(folder) / "run"), timeout=550)
    cpu = [each["cpu"] for each in found]
    return {
        "ranks": ranks,
        "check_ms": 1e3 * float(np.median([each["seconds"] for each in found])),
        "step_ms": 1e3 * float(np.median([each["step"] for each in found])),
        "cpu_ms_median": 1e3 * float(np.median(cpu)),
        "cpu_ms_most": 1e3 * max(cpu),
    }


class Simulated:
    """The group of one level of which this rank is the first member; the others' payloads are made up."""

    def __init__(self, places: range, stride: int, size: int, others: Callable[[int, int], bytes]) -> None:
        self.peers, self.position = PeerGroup(tuple(places), Axis.REPLICA), 0
        self._spans = [(place, min(place + stride, size)) for place in places[1:]]
        self._others, self._prepared = others, list[bytes]()
        self.bytes = 0

    def prepare(self) -> None:
        """Make up the payloads of the next exchange, which is not this rank's work."""
        self._prepared = [self._others(*span) for span in self._spans]

    def gather(self, payload: bytes) -> list[bytes]:
        self.bytes += len(payload) + sum(map(len, self._prepared))
        return [payload, *self._prepared]

    def highest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def broadcast(self, payload: bytes, *, source: int) -> bytes:  # noqa: ARG002  see PeerChannel
        self.bytes += len(payload)
        return payload


def simulated_tree(size: int, others: Callable[[int, int], bytes]) -> tuple[TreeChannel, list[Simulated]]:
    levels = [Simulated(each, each.step, size, others) for each in groups_of(0, size, LOCAL)]
    return TreeChannel(PeerGroup(tuple(range(size)), Axis.REPLICA), 0, levels, LOCAL), levels


def packed(*parts: Runs) -> bytes:
    encoded = [each.encode() for each in parts]
    return b"".join(data for each in encoded for data in (struct.pack("<Q", len(each)), each))


def simulated(size: int, mesh: Mesh, laps: Sequence[Lap], rounds: int = 5) -> dict[str, Any]:
    """Return the CPU time of one check on rank 0, and on a rank that only compares signatures. Rank 0 looks
    for what is slow in a thread, beside the next step: training waits only for the rest."""
    values = {f"layer.0/surface.{number}": number * 7919 for number in range(SURFACES)}
    names = xxhash.xxh3_64_intdigest("\n".join(values).encode())
    own = struct.pack(f"<Q{len(values)}q", names, *values.values())

    def equal(first: int, end: int) -> bytes:
        return packed(Runs(np.array([end - first], "<u4"), np.array([len(own)], "<u4"), own))

    evidence, signatures = simulated_tree(size, equal)

    context = Context(1, evidence.peers.ranks, "layer.0")
    comparisons = [Comparison(surface, Mode.FORWARD) for surface in values]

    def compare() -> None:
        verdicts = c3.compare(evidence, values)
        records = judge(context, comparisons, {name: each.evidence for name, each in verdicts.items()})
        assert all(each.status == Status.AGREE.value for each in records)

    measured = [Measured("layer.0", (2, 8), dict.fromkeys(TIMES, 5.0), laps)]
    layout, column = encode(measured, mesh)
    noise = np.random.default_rng(0)
    table = np.tile(np.frombuffer(column, "<f8"), (size, 1))
    groups = _groups_of(mesh, laps)

    def columns() -> None:
        table[:, : len(TIMES)] = 5.0 + 0.05 * noise.standard_normal((size, len(TIMES)))
        for number, group_of in enumerate(groups):
            table[:, len(TIMES) + 5 * number : len(TIMES) + 5 * number + 3] = group_of

    def others(first: int, end: int) -> bytes:
        count = end - first
        same = Runs(np.array([count], "<u4"), np.array([len(layout)], "<u4"), layout)
        apart = Runs(np.ones(count, "<u4"), np.full(count, len(column), "<u4"), table[first:end].tobytes())
        return packed(same, apart, Runs(same.counts, np.array([len(VOTES)], "<u4"), VOTES))

    stragglers = Stragglers(mesh, 0, StragglerConfig(), BaselineConfig())
    times, messages = simulated_tree(size, others)
    received_times: list[Timings] = []

    def answer(received: list[Runs]) -> bytes:
        layouts, columns, votes = received
        highest = np.frombuffer(votes.payloads, "<i8").reshape(len(votes.lengths), -1).max(axis=0)
        received_times[:] = [decode(1, mesh, layouts, columns)]
        doubted = stragglers.layers_to_time_again(received_times[0])
        return json.dumps([[*doubted], highest.tolist()]).encode()

    def observe() -> None:
        found = stragglers.observe(received_times[0])
        assert not found.incidents, found.incidents[0].sentence

    spent: dict[str, list[float]] = {"evidence": [], "times": [], "beside": []}
    for _ in range(rounds):
        columns()
        for level in (*signatures, *messages):
            level.prepare()
        spent["evidence"].append(_timed(compare))
        spent["times"].append(_timed(lambda: times.consult([layout, table[0].tobytes(), VOTES], answer)))
        spent["beside"].append(_timed(observe))
    found = {name: 1e3 * float(np.median(each)) for name, each in spent.items()}
    return {
        "ranks": size,
        "cpu_ms_any_rank": found["evidence"],
        "training_ms": found["evidence"] + found["times"],
        "cpu_ms_rank_0": sum(found.values()),
        "levels": evidence.height,
        "bytes_rank_0": sum(level.bytes for level in messages) // rounds,
    }


def _groups_of(mesh: Mesh, laps: Sequence[Lap]) -> list[Any]:
    found = []
    for lap in laps:
        along = "replica" if len(lap.members) == mesh.degree("replica") else "tensor"
        columns = np.zeros((len(mesh), 3))
        for ranks in mesh.groups_along(along):
            columns[list(ranks)] = min(ranks), max(ranks), len(ranks)
        found.append(columns)
    return found


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def layouts(size: int) -> dict[str, tuple[Mesh, list[Lap]]]:
    replicas = Mesh.grid(replica=size)
    both = Mesh.grid(replica=size // 8, tensor=8)
    gradients = Lap("time/process_groups_all_reduce@", tuple(range(size)), 64, (1.0,))
    tensor = Lap("time/all_reduce@", tuple(range(8)), 64, (1.0,))
    return {"replicas": (replicas, [gradients]), "tensor 8": (both, [tensor])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--simulated", type=int, nargs="*", default=[1024, 8192, 16_384, 131_072])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    real = [measured_with(each) for each in options.ranks]
    print("ranks  check ms  step ms  CPU ms a rank (median, most)")
    for each in real:
        print(
            f"{each['ranks']:5}  {each['check_ms']:8.1f}  {each['step_ms']:7.1f}  "
            f"{each['cpu_ms_median']:6.1f} {each['cpu_ms_most']:6.1f}"
        )
    made_up = [
        {"layout": name} | simulated(size, mesh, laps)
        for size in options.simulated
        for name, (mesh, laps) in layouts(size).items()
    ]
    print("ranks    layout     CPU ms any rank  rank 0  training waits  levels  bytes of times at rank 0")
    for each in made_up:
        print(
            f"{each['ranks']:7}  {each['layout']:9}  {each['cpu_ms_any_rank']:15.1f}  "
            f"{each['cpu_ms_rank_0']:6.1f}  {each['training_ms']:14.1f}  {each['levels']:6}  "
            f"{each['bytes_rank_0']:10}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"processes": real, "simulated": made_up}, indent=1) + "\n")


if __name__ == "__main__":
    main()
