"""MoE shape coverage: which few expert shapes stand for all admitted ones (paper, section 6.2)."""
