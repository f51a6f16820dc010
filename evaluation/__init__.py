"""What we try torchscout on, outside of the package: jobs that train, and what must hold for each."""
