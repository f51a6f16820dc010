"""What the ledgers on memory and disk name, and which shards may therefore be deleted (paper, section 9).

Either tier can fail at any moment, for a while or for good. What a job finds after that depends on the
ledgers that were written last, so shards follow those ledgers and not the gate's newest state. Pure, but for
the lock; ``ledger_keeping`` writes and deletes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.inventory import Tier

__all__ = ["LedgerTiers"]

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
