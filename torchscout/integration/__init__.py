"""Attach to a job (paper, section 9): adapters, and the one place where the parts are put together."""
