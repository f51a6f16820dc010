"""Rounds: the observers report to a hub, which diagnoses a hang."""
