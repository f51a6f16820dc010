"""A copy of each rank's state in another machine's memory."""
