"""Which checkpoint can be trusted: the gate, its ledgers, and the choice at a restart."""
