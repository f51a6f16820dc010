"""The report on a run as one page: what happened, the evidence for it, and what was checked."""
