"""Scripts that do not know torchscout, as other people write them. Each leaves a digest of its state."""
