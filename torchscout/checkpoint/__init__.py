"""Checkpoints and the trust in them (paper, section 8).

``gate`` decides what is captured, certified and kept. ``state`` finds a rank's state and puts it back,
``snapshot`` copies it into memory while training goes on. ``tree`` and ``shard_format`` turn it into bytes
and back, ``shards`` keeps those in files. Deciding and reading bytes needs no torch.
"""
