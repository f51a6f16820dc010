"""Puts the shards of one layout together, and takes them apart for another (paper, section 9)."""
