"""In-situ replay of layers, updates and communication (paper, section 6)."""
