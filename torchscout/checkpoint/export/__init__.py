"""Writes a generation in the formats of other tools."""
