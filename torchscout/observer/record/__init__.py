"""The progress record, which a trainer writes and its observer reads."""
