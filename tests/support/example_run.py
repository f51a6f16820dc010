"""A run directory as a real job of 16 ranks leaves it, for pictures and for people to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.incidents import incident_from
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.types import (
    Action,
    Decision,
    EvidenceRecord,
    Failure,
    Manifestation,
    Resolved,
    Started,
    Status,
    Trust,
    Verdict,
)
from torchscout.mesh import AXES, Mesh
from torchscout.run.folder import RankEntry
from torchscout.run.writer import RunWriter, SummaryRecorder

CORRUPT, SLOW, HUNG = 5, 10, 6
THREADS = """
Thread (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/job/data/loader.py", line 93 in prefetch
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

4 threads of torchscout are not shown
"""
STACK = f"""Main thread (most recent call first):
  File "/job/data/tokens.py", line 88 in read_shard
  File "/job/data/loader.py", line 41 in __next__
  File "/job/train.py", line 112 in train
  File "/job/train.py", line 171 in <module>
{THREADS}"""
WAITS = f"""Main thread (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2946 in all_reduce
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/job/train.py", line 118 in train
  File "/job/train.py", line 171 in <module>
{THREADS}"""


def write_example_run(run_dir: Path) -> None:
    """A slow rank, a flipped bit that the job recovered from, and a rank that holds up the job now."""
    hosts = [f"node-{rank // 4}" for rank in range(16)]
    mesh = Mesh.grid(replica=4, shard=4, hosts=hosts)
    for rank in range(16):
        address = mesh.address_of(rank)
        place = tuple(getattr(address, axis) for axis in AXES)
        RankEntry(
            rank, hosts[rank], 4200 + rank, f"record-{rank}", 16, 1, place, device=f"cuda:{rank % 4} (H200)"
        ).write(run_dir)
        recorder = SummaryRecorder(RunWriter(run_dir, rank), StragglerConfig())
        for step in range(20, 140, 20):
            for layer in range(4):
                for record in compared(mesh, rank, step, layer):
                    recorder.record(record)
        recorder.close()
    write_events(run_dir, mesh)


def compared(mesh: Mesh, rank: int, step: int, layer: int) -> list[EvidenceRecord]:
    peers, name = mesh.peers_of(rank).ranks, f"layers.{layer}"
    values = [7 if each != CORRUPT or (step, layer) != (80, 2) else 9 for each in peers]
    times = [31.0 if each == SLOW and step >= 40 else 11 + (each * 7 + step) % 5 / 10 for each in peers]
    return [
        EvidenceRecord(
            step=step, surface=f"{name}/output", manifestation=Manifestation.SDC, peers=peers,
            verdict=exact(values), layer=name, mode="forward", shape=(8, 2048, 4096),
        ),
        EvidenceRecord(
            step=step, surface="time/module", manifestation=Manifestation.STRAGGLER, peers=peers,
            verdict=statistical(times), layer=name,
        ),
    ]  # fmt: skip


def write_events(run_dir: Path, mesh: Mesh) -> None:
    recorder = RunWriter(run_dir, 0)
    record = recorder.record
    record(Started(step=0, sentence="torchscout was attached to 16 ranks on 4 machines."))
    for step in (20, 40):
        record(Trust(step=step, latest=step - 1, candidate=step - 1, verified=step - 20, poisoned=None))
    _, slow = compared(mesh, SLOW, 60, 0)
    record(
        incident_from(
            slow, (SLOW,), action=Action.INSPECT,
            sentence="Rank 10 on node-2 is slow: time/module took 31.0 ms, 2.7 times the median of its "
            "peers, in 2 checks in a row.",
        )
    )  # fmt: skip
    record(Trust(step=60, latest=59, candidate=59, verified=40, poisoned=None))
    corrupt, _ = compared(mesh, CORRUPT, 80, 2)
    sentence = "Rank 5 on node-1 computes wrong numbers: layers.2/output differs from 3 equal replicas."
    corrupted = incident_from(corrupt, (CORRUPT,), action=Action.REPLACE, sentence=sentence)
    record(corrupted)
    record(
        Decision(
            step=80, action=Action.REPLACE, failure=Failure.SDC, ranks=(CORRUPT,), hosts=("node-1",),
            sentence="Replace machine node-1, and resume from step 60.", is_carried_out=True,
            incident=corrupted.id,
        )
    )  # fmt: skip
    record(Trust(step=80, latest=None, candidate=None, verified=60, poisoned=80))
    end = {"incident": corrupted.id, "step": 80, "ranks": (CORRUPT,), "sentence": sentence}
    record(Resolved(**end, stalled_seconds=0.0, recovered=60))
    record(Started(step=60, sentence="All ranks load step 60, the newest state that is verified."))
    for step in (80, 100, 120):
        record(Trust(step=step, latest=step - 1, candidate=step - 1, verified=step - 20, poisoned=None))
    everyone = tuple(range(16))
    stuck = EvidenceRecord(
        step=127,
        surface="issued/default_pg",
        manifestation=Manifestation.HANG,
        peers=everyone,
        verdict=Verdict(Status.ATTRIBUTED, (HUNG,), tuple(3840 + (rank != HUNG) for rank in everyone)),
        progress={"rank": HUNG, "stack": STACK, "process": "running", "phase": "input"},
        fingerprints=("all_reduce float32[16777216]",),
        stall_seconds=31.0,
    )
    hung = incident_from(
        stuck, (HUNG,), action=Action.RESTART,
        sentence="Rank 6 on node-1 has not entered all_reduce number 3841 of group default_pg; it has "
        "been in input for 31 s. 15 ranks wait for it.",
    )  # fmt: skip
    waiters = (replace(stuck, surface="stack", peers=(rank,), verdict=None, reason="shown",
        progress={"rank": rank, "stack": WAITS}) for rank in range(3))  # fmt: skip
    record(replace(hung, records=(stuck, *waiters)))
    recorder.close()
