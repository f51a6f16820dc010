"""The ledgers in memory and on disk: writing both, and which shards may be deleted by what they name (paper,
section 9).

Either tier can fail at any moment, for a while or for good. What a job finds after that depends on the
ledgers that were written last, so shards follow those ledgers and not the gate's newest state.

[Note: which ledger protects which shards].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate_state import CheckpointGate, Effects
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.snapshot.snapshots import Snapshots
from torchscout.checkpoint.storage import retention
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.storage.shard_files import ShardFile, shard_files
from torchscout.errors import CheckpointError

__all__ = ["LedgerKeeper", "LedgerTiers"]

# [Note: which ledger protects which shards]
#
# A restarted job goes by the newest ledger that it finds (``ledger.newest``). While both tiers are there, it
# is the newer of the two, and the shards that it expects in memory must be there. If the machine is lost, its
# memory is lost with it, and the ledger on disk decides, however old it is: files stay as long as any ledger
# names them. A ledger in memory that cannot be replaced stops protecting memory once the one on disk is
# newer: otherwise a full memory would end all further captures.


class LedgerTiers:
    """The last ledger that was written in each tier. Any thread may call."""

    def __init__(self, memory: CheckpointGate | None = None, disk: CheckpointGate | None = None) -> None:
        """What was found when the job began; None for a tier without a ledger that can be read."""
        self._written = {Tier.MEMORY: memory, Tier.DISK: disk}
        self._unneeded: dict[Tier, set[Generation]] = {tier: set() for tier in Tier}
        self._lock = threading.Lock()

    def written(self, tier: Tier, gate: CheckpointGate) -> None:
        """This tier's ledger is sealed, with this state."""
        with self._lock:
            self._written[tier] = gate

    def last(self, tier: Tier) -> CheckpointGate | None:
        """The state in this tier's last ledger."""
        with self._lock:
            return self._written[tier]

    def give_up(self, tier: Tier, generations: Iterable[Generation]) -> None:
        """The gate does not need these in this tier any more."""
        with self._lock:
            self._unneeded[tier].update(generations)

    def deletable(self, tier: Tier) -> frozenset[Generation]:
        """Of those that were given up, what no ledger names any more; each is returned once."""
        with self._lock:
            free = self._unneeded[tier] - self._named(tier)
            self._unneeded[tier] -= free
            return frozenset(free)

    def named(self, tier: Tier) -> frozenset[Generation]:
        """The generations that must not be deleted from this tier, even if the gate no longer needs them."""
        with self._lock:
            return self._named(tier)

    def _named(self, tier: Tier) -> frozenset[Generation]:
        ledgers = [gate for gate in self._written.values() if gate is not None]
        if tier is Tier.DISK:
            return frozenset().union(*(gate.held for gate in ledgers))
        last = max(((gate.lineage, gate.step) for gate in ledgers), default=None)
        return frozenset().union(*(gate.in_memory for gate in ledgers if (gate.lineage, gate.step) == last))


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
