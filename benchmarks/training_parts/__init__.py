"""The parts of ``benchmarks/gpu_training.py``."""
