"""Parts of ``flips_at_rest.py``."""
