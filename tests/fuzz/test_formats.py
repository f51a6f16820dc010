"""Every format that is read, with mutated inputs: a documented error or a result.

``make fuzz`` tries ``SCOUT_FUZZ`` mutants of each; ``make test`` about a hundred. What fails says its seed.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gates import train
from tests.support.mutation import bytes_mutant, document_mutant, text_mutant, tried
from tests.support.run_dirs import read_ends, read_roster
from tests.unit.test_record import AGREEMENTS, EVIDENCE, INCIDENT, NOT_CHECKED, RESOLVED, TIMES
from tests.unit.test_report import write_run
from torchscout.checkpoint import ledger
from torchscout.checkpoint.folder import Owner
from torchscout.checkpoint.gate import CheckpointGate, Generation, TrustLevel
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, decode, encode
from torchscout.config import ObserverConfig, ReplayConfig, StragglerConfig
from torchscout.decision.progress import CommGroup, Phase
from torchscout.errors import CheckpointError, DamagedError, TornRecordError
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds import protocol
from torchscout.report.document import documented
from torchscout.report.standing import standing
from torchscout.run.folder import End, Heartbeat, RankEntry
from torchscout.run.reader import IncidentLog, Run, read, read_run
from torchscout.run.writer import RunWriter
from torchscout.state import encoding
from torchscout.state.collect import StateParts, collect


def test_lock_owners():
    document = asdict(Owner.own("job", "run"))

    def attempt(chance: random.Random) -> None:
        owner = Owner.from_bytes(text_mutant(chance, document))
        if owner is not None:
            assert owner.is_this_process in (True, False)
            assert "since" in str(owner)

    tried(attempt, ())


def test_records(tmp_path: Path):
    recorder = RunWriter(tmp_path, 0)
    for item in (EVIDENCE, TIMES, NOT_CHECKED, INCIDENT, RESOLVED, AGREEMENTS):
        recorder.record(item)
    lines = [
        json.loads(line)
        for path in (tmp_path / "incidents" / "rank-0.jsonl", tmp_path / "records" / "rank-0.jsonl")
        for line in path.read_text().splitlines()
    ]
    path = tmp_path / "mutants.jsonl"

    def attempt(chance: random.Random) -> None:
        path.write_bytes(text_mutant(chance, chance.choice(lines)) + b"\n")
        for line in read(path):
            assert str(line)

    tried(attempt, (), corpus=(460,))


def test_run_directories(tmp_path: Path):
    """Whatever is in the files about incidents, the rest of the run is read and shown."""
    write_run(tmp_path)
    files = sorted((tmp_path / "incidents").iterdir())
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    damaged = tmp_path / "incidents" / "observer-0.jsonl"

    def attempt(chance: random.Random) -> None:
        damaged.write_bytes(text_mutant(chance, chance.choice(lines)) + b"\n"[chance.randrange(2) :])
        run = read_run(tmp_path)
        assert len(run.incidents) >= 2
        assert len(IncidentLog.read(tmp_path).incidents) >= 2
        if chance.random() < 0.02:  # it takes long
            assert json.dumps(documented(tmp_path))

    tried(attempt, ())


def test_rosters(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    document = asdict(RankEntry.own(0, tmp_path / "record"))

    def attempt(chance: random.Random) -> None:
        (tmp_path / "ranks" / "rank-0.json").write_bytes(text_mutant(chance, document))
        for entry in read_roster(tmp_path):
            assert standing(entry)["state"]

    tried(attempt, (ValueError,))


def test_ends(tmp_path: Path):
    (tmp_path / "ends").mkdir()
    entry = RankEntry.own(0, tmp_path / "record")
    document = asdict(End(0, "failed", 3, entry.record, "ValueError: no"))

    def attempt(chance: random.Random) -> None:
        (tmp_path / "ends" / "rank-0.json").write_bytes(text_mutant(chance, document))
        for end in read_ends(tmp_path).values():
            assert standing(entry, end)["state"]

    tried(attempt, ())


def test_heartbeats(tmp_path: Path):
    run, entry = Run(tmp_path), RankEntry.own(0, tmp_path / "record")
    run.entries.append(entry)
    document = asdict(Heartbeat(0, entry.record, 3, 30.0))

    def attempt(chance: random.Random) -> None:
        (tmp_path / "heartbeat.json").write_bytes(text_mutant(chance, document))
        last = run.last_heartbeat()
        assert last is None or standing(entry, None, last)["state"]

    tried(attempt, ())


def test_messages():
    kinds = [
        {"kind": "announce", "is_repeat": False, "findings": []},
        {"kind": "stack", "round": 1, "stack": "", "waiting": None},
        {"kind": "moved", "seconds": 1.5, "findings": [], "is_reporter": True},
    ]

    def attempt(chance: random.Random) -> None:
        text = text_mutant(chance, chance.choice(kinds))
        protocol.decode(text, protocol.Tally())
        protocol.decode(bytes_mutant(chance, zlib.compress(text)), protocol.Tally())

    tried(attempt, protocol.MISTAKES)


def test_progress_records(tmp_path: Path):
    writer = ProgressWriter.create(tmp_path / "records", 0)
    line = writer.declare(CommGroup("world", (0, 1), "world"))
    phrase = writer.phrase("all_reduce float32[8] sum", 7)
    for _ in range(5):
        writer.advance(Phase.FORWARD)
        writer.issue(line, phrase, [1, 2], [3, 4])
        writer.next_step()
    whole = writer.path.read_bytes()
    used = len(whole.rstrip(b"\0")) + 64
    path = tmp_path / "records" / "mutant"
    path.touch(mode=0o600)

    def attempt(chance: random.Random) -> None:
        data = bytearray(whole)
        for _ in range(chance.choice((1, 4, 32))):
            at = chance.randrange(used)
            data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), chance.randbytes(8)))
        path.write_bytes(data)
        reader = ProgressReader(path)
        reader.read()
        reader.groups()
        reader.step_seconds()

    try:
        tried(attempt, (ValueError, TornRecordError))
    finally:
        writer.close()


def test_states():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    registered = {"schedule": schedule, "average": torch.optim.swa_utils.AveragedModel(model)}
    state = collect(StateParts(model, [optimizer], registered))
    others = [deque([1], 2), {2}, b"a", 1j, 1 << 60, float("nan"), torch.float16, torch.device("cpu")]
    document, tensors = encoding.encode([*others, np.float32(1), torch.Size([2])])

    def attempt(chance: random.Random) -> None:
        for whole, known in ((state.document, state.tensors), (document, tensors)):
            with suppress(DamagedError):
                encoding.decode(document_mutant(chance, whole), known)

    tried(attempt, ())


def test_ledgers(tmp_path: Path):
    gate = train(CheckpointGate(recipes=2), "hhhhh")
    document = {"schema": 1, "job": "job", "world_size": 4, "rank": 1, "gate": gate.to_json()}
    path = ledger.path_of(tmp_path, 1)

    def attempt(chance: random.Random) -> None:
        body = text_mutant(chance, document)
        sealed = ledger._sealed(body)  # the digest is right: damage that no digest finds
        path.write_bytes(sealed if chance.random() < 0.8 else bytes_mutant(chance, sealed))
        ledger.inspect(tmp_path, 1)

    tried(attempt, (CheckpointError,))


def test_shards():
    identity = ShardIdentity(job="job", mesh="m", world_size=2, rank=1, generation=Generation(3))
    blobs = [Blob("a", "float32", (2, 3), bytes(24)), Blob("b", "uint8", (5,), bytes(5))]
    whole = b"".join(map(bytes, encode(identity, TrustLevel.LATEST, {"x": 1}, blobs)))

    def attempt(chance: random.Random) -> None:
        mutant = bytes_mutant(chance, whole)
        decode(mutant)
        assert mutant[: len(whole)] == whole, "damage was not found"  # what follows belongs to nothing

    tried(attempt, (CheckpointError,))


@pytest.mark.parametrize("config", [StragglerConfig, ObserverConfig, ReplayConfig])
def test_settings(config: type):
    plain = {name: value for name, value in asdict(config()).items() if not isinstance(value, dict)}

    def attempt(chance: random.Random) -> None:
        mutant: Any = document_mutant(chance, plain)
        if isinstance(mutant, dict) and mutant.keys() <= plain.keys():
            config(**mutant)

    tried(attempt, (ValueError,))
