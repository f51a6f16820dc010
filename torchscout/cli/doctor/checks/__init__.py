"""What facts mean, as findings. Pure: ``probes`` finds the facts out."""
