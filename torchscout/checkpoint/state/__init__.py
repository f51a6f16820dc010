"""Collects and restores a rank's training state."""
