"""The cells of all campaigns, and the jobs that run them."""
