"""Entry points inside a framework's own training loop."""
