"""What frameworks tell SCOUT about a job (paper, section 9)."""
