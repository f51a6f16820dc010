"""Random faults in jobs of any size, decided by the product's own functions and scored against the truth."""
