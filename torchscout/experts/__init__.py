"""Representative shapes of mixture-of-experts layers (paper, section 6.2)."""
