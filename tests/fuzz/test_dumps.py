"""Dumps of the Flight Recorder with mutated contents: a documented error or an explanation."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.flight_recorder import Recorders
from tests.support.mutation import bytes_mutant, document_mutant, text_mutant, tried
from torchscout.cli.explain import load
from torchscout.decision.flight_recorder import Dump, explain, read_dump

SIZE = 3


def hanging_job() -> Recorders:
    """Its dumps contain collectives of two groups, transfers, and what is launched together."""
    job = Recorders(SIZE).collective("broadcast", [3])
    group = job.group("1", "one", [0, 2])
    job.collective(group=group).send(0, 1).receive(0, 1)
    job.batch(0, [("send", 1)]).batch(1, [("recv", 0)])
    return job.collective("all_gather", [5], ranks=[0, 1], state="started")


def pickled(chance: random.Random, document: Any) -> bytes:
    data = pickle.dumps(document_mutant(chance, document), chance.randrange(pickle.HIGHEST_PROTOCOL + 1))
    return bytes_mutant(chance, data) if chance.random() < 0.5 else data


@pytest.mark.parametrize("written", [text_mutant, pickled])
def test_dumps(written: Callable[[random.Random, Any], bytes]):
    documents = hanging_job().documents()

    def attempt(chance: random.Random) -> None:
        dumps: list[Dump] = []
        for rank, document in documents.items():
            if chance.random() < 0.2:
                continue
            mutant = document if chance.random() < 0.4 else load(written(chance, document))
            dumps.append(read_dump(rank, mutant))
        assert explain(dumps, SIZE).sentence

    tried(attempt, (ValueError, RecursionError, MemoryError))
