"""Out-of-band observers, which localize hangs (paper, section 7)."""
