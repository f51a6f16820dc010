"""Real ranks and small models, for the demo, the campaign and tests."""
