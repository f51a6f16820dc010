"""`scout checkpoint`: what lies in a job's checkpoint folders, and what a recovery would make of it."""
