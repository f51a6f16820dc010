"""What can be replayed, one module a kind."""
