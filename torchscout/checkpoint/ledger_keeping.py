"""One rank's ledgers in memory and on disk, and deleting the shards that no ledger names (paper, section 9).

Neither tier depends on the other, and either may fail. Shards are deleted after a ledger was written that
does not name them: see [Note: which ledger protects which shards].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchscout.checkpoint import ledger, retention
from torchscout.checkpoint.gate import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.happening import Effects
from torchscout.checkpoint.inventory import Member, Tier
from torchscout.checkpoint.ledger_tiers import LedgerTiers
from torchscout.checkpoint.replicate import Replicator
from torchscout.checkpoint.shard_files import ShardFile, shard_files
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.errors import CheckpointError

__all__ = ["LedgerKeeper"]


class LedgerKeeper:
    """What one rank has written down about its checkpoints, in both tiers."""

    def __init__(
        self,
        member: Member,
        memory: Path,
        disk: Path,
        tiers: LedgerTiers,
        snapshots: Snapshots,
        replicator: Replicator | None,
    ) -> None:
        self._member, self._memory, self._disk = member, memory, disk
        self._tiers, self._snapshots, self._replicator = tiers, snapshots, replicator
        self._retired: set[Generation] = set()
        """What the gate needs nowhere any more, as long as memory has it."""

    def give_up(self, before: CheckpointGate, gate: CheckpointGate, effects: Effects) -> None:
        """What an event has made superfluous; it is deleted when the ledgers are written."""
        self._retired |= {*effects.retire}
        self._tiers.give_up(Tier.DISK, effects.retire)
        # What is in files need not be in another machine's memory as well.
        self._tiers.give_up(Tier.MEMORY, before.in_memory.union(effects.retire) - gate.in_memory)

    def write(
        self, gate: CheckpointGate, coverage: str | None, later: Callable[[Callable[[], object]], None]
    ) -> str | None:
        """Write to memory at once, and to disk ``later``; returns why memory could not be written."""
        problem = None
        write = partial(
            ledger.write,
            rank=self._member.rank,
            gate=gate,
            job=self._member.job,
            world_size=self._member.world_size,
            coverage=coverage,
        )
        try:
            write(self._memory)
            self._tiers.written(Tier.MEMORY, gate)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        self._leave_memory()

        def write_to_disk() -> None:
            write(self._disk)
            self._tiers.written(Tier.DISK, gate)

        later(write_to_disk)
        later(self._leave_files)
        return problem

    def tidy(self, gate: CheckpointGate) -> None:
        """Delete what a killed run was about to delete: earlier generations that the job no longer knows."""
        for tier, folder in ((Tier.MEMORY, self._memory), (Tier.DISK, self._disk)):
            needed = gate.held | self._tiers.named(tier)
            retention.remove(
                each
                for each in self._own(folder)
                if each.generation.lineage < gate.lineage and each.generation not in needed
            )

    def free(self, gate: CheckpointGate) -> None:
        """Delete what memory holds and files hold as well, when a job has ended. Nothing is deleted as long
        as the ledger on disk is not the newest."""
        if self._tiers.last(Tier.DISK) != gate:
            return
        on_disk = {each.path.relative_to(self._disk) for each in self._own(self._disk)}
        held = self._own(self._memory)
        unneeded = [
            each
            for each in held
            if each.path.relative_to(self._memory) in on_disk or each.generation not in gate.held
        ]
        retention.remove(unneeded)
        if len(unneeded) == len(held):
            ledger.remove(self._memory, self._member.rank)

    def _own(self, folder: Path) -> list[ShardFile]:
        """The shards that this rank keeps there, its own and copies."""
        whose = (self._member.rank, self._member.world_size)
        return [each for each in shard_files(folder) if (each.holder, each.world_size) == whose]

    def _leave_memory(self) -> None:
        """Delete what no ledger counts on in memory."""
        free = self._tiers.deletable(Tier.MEMORY)
        for generation in free & self._retired:
            self._snapshots.retire(generation)
        self._retired -= free
        if self._replicator is not None and free:
            self._replicator.retire(free)

    def _leave_files(self) -> None:
        """After a ledger was written to disk, or could not be."""
        self._leave_memory()
        if free := self._tiers.deletable(Tier.DISK):
            retention.retire(self._disk, free, self._member.rank)
