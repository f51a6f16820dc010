"""The state of training on one rank: every tensor by name, and how it is collected, stored and restored."""
