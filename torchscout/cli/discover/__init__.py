"""``scout discover``: makes a catalog of expert shapes."""
