"""`scout demo`: faults in a small training job, named and recovered from."""
