"""Replay in a session: when checks run, what they compare, and what they cost."""
