"""What to do about an incident (paper, sections 4 and 8)."""
