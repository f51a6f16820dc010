"""Writes ledgers to memory and disk, and deletes the shards that they no longer name (paper, section 9).

Either tier can fail at any moment, for a while or for good. A restarted job depends on the ledgers that were
written last, so they, and not the gate's newest state, decide which shards may be deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage import retention
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.storage.shard_files import ShardFile, shard_files
from torchscout.checkpoint.trust import ledger
from torchscout.checkpoint.trust.gate_state import CheckpointGate, Effects
from torchscout.checkpoint.trust.generation import Generation
from torchscout.errors import CheckpointError

__all__ = ["LedgerKeeper", "LedgerTiers"]

# [Note: which ledger protects which shards]
#
# A restarted job uses the newest ledger that it finds (``ledger.newest``). While both tiers are there, that
# is the newer of the two, and the shards that it expects in memory must be there. If the machine is lost, so
# is its memory, and the ledger on disk decides, however old it is: files stay as long as any ledger names
# them. A ledger in memory that cannot be replaced stops protecting memory once the one on disk is newer:
# otherwise a full memory would end all further captures.


class LedgerTiers:
    """The last ledger that was written in each tier. Thread-safe."""

    def __init__(self, memory: CheckpointGate | None = None, disk: CheckpointGate | None = None) -> None:
        """The ledgers found when the job began; None for a tier without a readable one."""
        self._written = {Tier.MEMORY: memory, Tier.DISK: disk}
        self._unneeded: dict[Tier, set[Generation]] = {tier: set() for tier in Tier}
        self._lock = threading.Lock()

    def written(self, tier: Tier, gate: CheckpointGate) -> None:
        """Record that this tier's ledger now holds this state."""
        with self._lock:
            self._written[tier] = gate

    def last(self, tier: Tier) -> CheckpointGate | None:
        """The state in this tier's last ledger."""
        with self._lock:
            return self._written[tier]

    def give_up(self, tier: Tier, generations: Iterable[Generation]) -> None:
        """Record that the gate no longer needs these generations in this tier."""
        with self._lock:
            self._unneeded[tier].update(generations)

    def deletable(self, tier: Tier) -> frozenset[Generation]:
        """The generations that were given up and that no ledger names any more; each is returned once."""
        with self._lock:
            free = self._unneeded[tier] - self._named(tier)
            self._unneeded[tier] -= free
            return frozenset(free)

    def named(self, tier: Tier) -> frozenset[Generation]:
        """The generations that ledgers protect from deletion in this tier."""
        with self._lock:
            return self._named(tier)

    def _named(self, tier: Tier) -> frozenset[Generation]:
        ledgers = [gate for gate in self._written.values() if gate is not None]
        if tier is Tier.DISK:
            return frozenset().union(*(gate.held for gate in ledgers))
        last = max(((gate.lineage, gate.step) for gate in ledgers), default=None)
        return frozenset().union(*(gate.in_memory for gate in ledgers if (gate.lineage, gate.step) == last))


class LedgerKeeper:
    """Writes one rank's ledgers and deletes shards that they no longer name."""

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
        """Generations in memory that the gate no longer needs anywhere."""

    def give_up(self, before: CheckpointGate, gate: CheckpointGate, effects: Effects) -> None:
        """Note which generations an event has made superfluous; ``write`` deletes them."""
        self._retired |= {*effects.retire}
        self._tiers.give_up(Tier.DISK, effects.retire)
        # Generations that are in files are not kept in another machine's memory.
        self._tiers.give_up(Tier.MEMORY, before.in_memory.union(effects.retire) - gate.in_memory)

    def write(
        self, gate: CheckpointGate, coverage: str | None, later: Callable[[Callable[[], object]], None]
    ) -> str | None:
        """Write to memory now and to disk ``later``. Returns why memory could not be written, or None."""
        problem = None

        def write(tier: Tier, folder: Path) -> None:
            job, size = self._member.job, self._member.world_size
            ledger.write(folder, self._member.rank, gate, job=job, world_size=size, coverage=coverage)
            self._tiers.written(tier, gate)

        try:
            write(Tier.MEMORY, self._memory)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        self._delete_from_memory()
        later(lambda: write(Tier.DISK, self._disk))
        later(self._delete_everywhere)
        return problem

    def tidy(self, gate: CheckpointGate) -> None:
        """Delete generations of earlier lineages that no ledger names; a killed run may have left them."""
        for tier, folder in ((Tier.MEMORY, self._memory), (Tier.DISK, self._disk)):
            needed = gate.held | self._tiers.named(tier)
            earlier = self._own(folder, lambda each: each.lineage < gate.lineage)
            self._remove([each for each in earlier if each.generation not in needed])

    def free(self, gate: CheckpointGate) -> None:
        """After the job, delete from memory what is also in files, if the ledger on disk is current."""
        if self._tiers.last(Tier.DISK) != gate:
            return
        held = self._own(self._memory)
        kept = {each.generation for each in held}
        on_disk = {each.path.relative_to(self._disk) for each in self._own(self._disk, kept.__contains__)}
        unneeded = [
            each
            for each in held
            if each.path.relative_to(self._memory) in on_disk or each.generation not in gate.held
        ]
        retention.remove(unneeded)
        if len(unneeded) == len(held):
            ledger.remove(self._memory, self._member.rank)

    def _own(self, folder: Path, wanted: Callable[[Generation], bool] = lambda _: True) -> list[ShardFile]:
        """The shards that this rank keeps in a folder: its own and copies of other ranks'."""
        found = shard_files(folder, wanted, holder=self._member.rank)
        return [each for each in found if each.world_size == self._member.world_size]

    def _delete_from_memory(self) -> None:
        free = self._tiers.deletable(Tier.MEMORY)
        unneeded = free & self._retired
        with suppress(CheckpointError):  # ``tidy`` tries again in the next run
            found = shard_files(self._memory, unneeded.__contains__, holder=self._member.rank)
            # The replicator keeps the file of a copy for the next one.
            self._remove([each for each in found if self._replicator is None or not each.is_replica])
        self._retired -= free
        if self._replicator is not None and free:
            self._replicator.retire(free)

    def _remove(self, files: Sequence[ShardFile]) -> None:
        """Delete these files, except that snapshots give theirs to the next ones."""
        retired = {
            each.generation
            for each in files
            if not each.is_replica and each.path.is_relative_to(self._memory)
            if self._snapshots.retire(each.generation)
        }
        retention.remove(each for each in files if each.is_replica or each.generation not in retired)

    def _delete_everywhere(self) -> None:
        """After a ledger was written to disk, or could not be."""
        self._delete_from_memory()
        if free := self._tiers.deletable(Tier.DISK):
            retention.retire(self._disk, free, self._member.rank)
