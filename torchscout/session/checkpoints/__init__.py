"""Checkpoints in a session: capturing, certifying, replicating and resuming."""
