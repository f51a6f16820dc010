"""The out-of-band hang observer: what a trainer publishes, who watches, who concludes (paper, section 7)."""
