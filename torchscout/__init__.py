"""Names the sick rank, machine or process group of a distributed training job, while it runs."""
