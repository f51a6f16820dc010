"""Asynchronous capture into shared memory."""
