"""From folders to the state of every rank."""
