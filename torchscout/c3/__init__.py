"""C3, the consensus collective: signatures, their exchange, and the vote (paper, section 5)."""
