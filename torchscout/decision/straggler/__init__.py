"""Slow ranks, process groups, phases and jobs (paper, section 5.4)."""
