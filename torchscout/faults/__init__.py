"""Deliberate faults for tests, the demo and campaigns; production code never imports this package."""
