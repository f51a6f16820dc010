"""Real faults in real jobs, cell by cell."""
