"""Checkpoint folders as a job leaves them: four ranks, a catalog of two recipes, seven accepted checks.

Candidate is step 6, verified 4, and 2 an older verified one. Step 7 was being captured when the job was
killed, and is the latest if it is there. The disk has what is durable, the memory what was captured last,
there with every rank's copy at its neighbour's.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.gates import train
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import Checked, CheckpointGate, Generation, Outcome, TrustLevel, transition
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, encode
from torchscout.checkpoint.storage.shards import path_of, write

JOB, RANKS = "llm-41f0", 4
GATE, _ = transition(train(CheckpointGate(recipes=2), "hhhhhh"), Checked(7, Outcome.HEALTHY))
DURABLE = [Generation(2), Generation(4), Generation(6)]


def put_shard(
    folder: Path,
    generation: Generation,
    rank: int,
    holder: int | None = None,
    *,
    job: str = JOB,
    of: int = RANKS,
) -> Path:
    identity = ShardIdentity(job=job, mesh=f"replica={of}", world_size=of, rank=rank, generation=generation)
    weight = Blob("model/weight", "uint8", (64,), bytes([generation.step % 256, rank] * 32))
    moment = Blob("optimizer/exp_avg", "uint8", (32,), bytes(32))
    path = path_of(folder, identity, rank if holder is None else holder)
    write(path, encode(identity, TrustLevel.CANDIDATE, None, [weight, moment]))
    return path


def put_ledgers(folder: Path, gate: CheckpointGate = GATE, *, job: str = JOB, of: int = RANKS) -> None:
    for rank in range(of):
        ledger.write(folder, rank, gate, job=job, world_size=of)


def make_disk(folder: Path) -> Path:
    for generation in DURABLE:
        for rank in range(RANKS):
            put_shard(folder, generation, rank)
    put_ledgers(folder)
    return folder


def make_memory(folder: Path) -> Path:
    for generation in (Generation(6), Generation(7)):
        for rank in range(RANKS):
            put_shard(folder, generation, rank)
            put_shard(folder, generation, rank, (rank + 1) % RANKS)
    put_ledgers(folder)
    return folder


def rewrite(path: Path, data: bytes) -> None:
    """Damage, of whatever kind: sealed files are not writable."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, byte: int = -40) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    rewrite(path, bytes(data))
