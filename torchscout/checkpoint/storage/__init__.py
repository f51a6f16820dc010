"""Shards as bytes, files and folders."""
