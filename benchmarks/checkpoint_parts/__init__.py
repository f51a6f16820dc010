"""The parts of ``benchmarks/checkpoint.py``, one question each; ``job`` is what they share."""
