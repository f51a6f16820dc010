"""Produce comparable observations: what a rank did, is doing, does when asked to repeat it (paper, 6, 7)."""
