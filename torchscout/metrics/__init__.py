"""What monitoring shows of a job: Prometheus, OpenTelemetry, TensorBoard and Weights & Biases."""
