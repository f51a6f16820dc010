"""Copies each rank's state into another machine's memory."""
