"""One rank's session: the orchestrators that join replay, observers and checkpoints."""
