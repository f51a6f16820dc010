"""`scout demo`: a real small training job, one real fault, and the verdict."""
