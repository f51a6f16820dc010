"""The command `scout discover`."""
