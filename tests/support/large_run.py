"""A run directory of many ranks, written by the classes that real jobs use."""

from __future__ import annotations

from pathlib import Path

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.types import (
    Action,
    Decision,
    EvidenceRecord,
    Failure,
    Incident,
    Manifestation,
    Scope,
    Started,
    Status,
    Trust,
    Verdict,
)
from torchscout.mesh import AXES, Mesh
from torchscout.run.folder import End, RankEntry
from torchscout.run.writer import RunWriter, SummaryRecorder

LARGE = 16_384
HUNG, SLOW = 9_001, 12_345
LAYERS = 4


def write_large_run(run_dir: Path, size: int = LARGE, per_host: int = 8) -> None:
    """Write the roster, records and incidents of a job with a slow and, later, a hung rank."""
    shard, tensor = 32, 8
    hosts = [f"node-{rank // per_host:04d}" for rank in range(size)]
    mesh = Mesh.grid(replica=size // (shard * tensor), shard=shard, tensor=tensor, hosts=hosts)
    for rank in range(size):
        address = mesh.address_of(rank)
        entry = RankEntry(
            rank, hosts[rank], 1000 + rank, f"record-{rank}", size, 1,
            tuple(getattr(address, axis) for axis in AXES), f"cuda:{rank % per_host} (H200)",
        )  # fmt: skip
        entry.write(run_dir)
        peers = mesh.peers_of(rank).ranks
        if rank == peers[0]:  # the machines of the others do not share the run directory
            write_records(run_dir, rank, peers)
    End(HUNG, "killed", 40, f"record-{HUNG}").write(run_dir)
    write_incidents(run_dir, mesh)


def write_records(run_dir: Path, rank: int, peers: tuple[int, ...]) -> None:
    recorder = SummaryRecorder(RunWriter(run_dir, rank), StragglerConfig())
    for step in (20, 40):
        for layer in range(LAYERS):
            recorder.record(times_at(step, peers, layer))
            recorder.record(
                EvidenceRecord(
                    step=step,
                    surface=f"layer.{layer}/output",
                    manifestation=Manifestation.SDC,
                    peers=peers,
                    verdict=exact([7] * len(peers)),
                    layer=f"layer.{layer}",
                    mode="forward",
                )
            )
    recorder.close()


def times_at(step: int, peers: tuple[int, ...], layer: int) -> EvidenceRecord:
    times = [40.0 if rank == SLOW else 10.0 + (rank * 7 + layer) % 13 / 10 for rank in peers]
    return EvidenceRecord(
        step=step,
        surface="time/module",
        manifestation=Manifestation.STRAGGLER,
        peers=peers,
        verdict=statistical(times),
        layer=f"layer.{layer}",
    )


def write_incidents(run_dir: Path, mesh: Mesh) -> None:
    everyone = tuple(range(len(mesh)))
    recorder = RunWriter(run_dir, 0)
    recorder.record(Started(step=0, sentence=f"torchscout was attached to {len(mesh)} ranks."))
    for step in range(20, 60, 20):
        recorder.record(Trust(step=step, latest=step - 20, candidate=None, verified=step - 20, poisoned=None))
    slow = times_at(40, mesh.peers_of(SLOW).ranks, 0)
    recorder.record(
        incident(mesh, SLOW, (slow,), Manifestation.STRAGGLER, f"Rank {SLOW} is slow.", Action.INSPECT)
    )
    stuck = EvidenceRecord(
        step=40,
        surface="issued/default_pg",
        manifestation=Manifestation.HANG,
        peers=everyone,
        verdict=Verdict(Status.ATTRIBUTED, (HUNG,), tuple(99 + (rank != HUNG) for rank in everyone)),
        progress={"rank": HUNG, "stack": 'File "train.py", line 3 in fetch', "process": "running"},
        stall_seconds=31.0,
    )
    recorder.record(
        incident(mesh, HUNG, (stuck,), Manifestation.HANG, f"Rank {HUNG} holds up the job.", Action.RESTART)
    )
    recorder.record(
        Decision(
            step=40,
            action=Action.RESTART,
            failure=Failure.HANG,
            ranks=(HUNG,),
            hosts=mesh.hosts_of((HUNG,)),
            sentence=f"Restart in place: rank {HUNG} hangs.",
        )
    )
    recorder.close()


def incident(
    mesh: Mesh,
    rank: int,
    records: tuple[EvidenceRecord, ...],
    manifestation: Manifestation,
    sentence: str,
    action: Action,
) -> Incident:
    return Incident(
        manifestation=manifestation,
        scope=Scope.RANK,
        step=40,
        ranks=(rank,),
        hosts=mesh.hosts_of((rank,)),
        records=records,
        action=action,
        sentence=sentence,
    )
