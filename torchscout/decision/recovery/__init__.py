"""What to do about an incident, and what a restarted job must know."""
