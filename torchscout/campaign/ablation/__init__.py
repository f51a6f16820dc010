"""The method with one component missing."""
