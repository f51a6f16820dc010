"""Compares evidence and interprets the outcome (paper, section 5).

Everything is pure except ``channel`` and ``recorder``. Only ``channel``, ``signature`` and the folds import
torch.
"""
