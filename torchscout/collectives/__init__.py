"""The only place that sees the job's collectives: kernels at PyTorch's dispatcher."""
