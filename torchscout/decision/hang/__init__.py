"""Which rank or process group holds a job up, and why (paper, section 7)."""
