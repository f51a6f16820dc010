"""Compare evidence and interpret the outcome (paper, section 5).

Everything here is pure except ``channel`` and ``recorder``. Only ``channel``, ``signature`` and the folds
import torch.
"""
