"""The state of training on one rank: every tensor by name."""
