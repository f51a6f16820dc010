"""`scout doctor`: whether this machine is fit for a long run, and what to fix if not."""
