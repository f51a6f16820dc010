"""Checkpoints and the trust in them (paper, section 8).

``gate`` decides what is captured, certified and kept, ``tree`` and ``shard_format`` turn a rank's state into
bytes and back, ``shards`` keeps those in files. ``replicate`` copies them to another machine's memory, as
``placement`` says. At the start ``generations`` decides what is loaded, and ``fetch`` brings it to each rank.
Only ``tree``, ``tensors``, ``carry`` and ``fetch`` import torch.
"""
