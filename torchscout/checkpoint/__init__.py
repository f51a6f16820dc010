"""Checkpoints and the trust in them (paper, section 8).

``certification`` and ``gate`` decide what is captured, certified and kept. ``state`` finds a rank's state
and puts it back, ``snapshot`` copies it into memory while training goes on. ``storage.encoding`` and
``shard_format`` turn it into bytes and back, ``shards`` keeps those in files. ``background_writer`` takes
snapshots into files and, by ``replicate``, to another machine's memory, as ``placement`` says; ``ledger``
writes down what is trusted. At the start ``resume.plan`` decides what is loaded, and ``fetch`` brings it to
each rank. Deciding and reading bytes needs no torch.
"""
