"""The files of a job's run that outlive it: what a restarted job must know."""
