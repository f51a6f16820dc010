"""`scout campaign ablation`: the same cells, with one piece of the method missing at a time (paper)."""
