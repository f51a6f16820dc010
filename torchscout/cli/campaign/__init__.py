"""`scout campaign`: real faults in real jobs, cell by cell, and what was found of them (paper)."""
