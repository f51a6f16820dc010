"""What killed ranks have left behind, looked at from outside, and what became of them life by life.

Which generation all could go back to is found from ledgers and files alone, to hold it against what a resumed
job does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.checkpoint_jobs import Plan, reached, train
from tests.support.ranks import run_ranks
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate, Generation
from torchscout.checkpoint.storage import shards


def newest_complete(folders: Sequence[Path], ranks: int) -> int:
    """The step of the newest that all have certified and of which each state is there; 0 if there is none."""
    gates = [_written_down(folders, rank) for rank in range(ranks)]
    known = [each for each in gates if each is not None]
    if not known:
        return 0
    last = max(gate.lineage for gate in known)
    # What was being captured when a rank was killed is certified, too; whether it is whole the files show.
    certified = set.intersection(*({*gate.trusted, gate.pending} for gate in known if gate.lineage == last))
    complete = [
        each for each, there in whole(folders).items() if there == set(range(ranks)) and each in certified
    ]
    return max((each.step for each in complete), default=0)


def whole(folders: Sequence[Path]) -> dict[Generation, set[int]]:
    """Whose state is there, every bit of it, for each generation."""
    found: dict[Generation, set[int]] = {}
    for path in (path for folder in folders for path in folder.rglob("*.shard")):
        report = shards.verify(path)
        assert report.whole, f"a file under a sealed name is not whole: {report.problems}"
        assert report.header is not None
        found.setdefault(report.header.identity.generation, set()).add(report.header.identity.rank)
    return found


def _written_down(folders: Sequence[Path], rank: int) -> CheckpointGate | None:
    """What a rank had written down last."""
    found = [ledger.inspect(folder, rank) for folder in folders]
    return ledger.newest([each.gate for each in found if each is not None])


@dataclass
class History:
    """The starts of one job, one after the other."""

    ranks: int
    known: dict[int, list[str | None]] = field(default_factory=dict)
    """Each step's state on each rank, whoever did it first."""
    resumed_from: list[int] = field(default_factory=list)
    """The step that each start has resumed from."""

    def add_run(self, life: Plan, expected: int) -> None:
        """Check a start that should have resumed from this step, and add it."""
        for rank in range(self.ranks):
            steps = reached(life, rank)
            assert next(iter(steps)) == expected, "it began with the newest complete generation"
            for step, bits in steps.items():
                states = self.known.setdefault(step, [None] * self.ranks)
                states[rank] = states[rank] or bits
                assert states[rank] == bits, f"rank {rank} has another state at step {step} than before"
        self.resumed_from.append(expected)

    def is_as_uninterrupted(self, plan: Plan) -> None:
        last = max(self.known)
        alone = run_ranks(train, self.ranks, replace(plan, directory=None, steps=last), timeout=300)
        for step, states in self.known.items():
            for rank, bits in enumerate(states):
                if bits is not None and step > 0:
                    assert bits == alone[rank].bits[step], f"step {step} is not what an uninterrupted job has"
