"""Checkpoints and the trust in them (paper, section 8).

``gate`` decides what is captured, certified and kept, ``tree`` and ``shard_format`` turn a rank's state into
bytes and back, ``shards`` keeps those in files. Only ``tree`` and ``tensors`` import torch.
"""
