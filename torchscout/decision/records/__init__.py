"""Comparisons and incidents as data, and the files of a run directory that hold them."""
