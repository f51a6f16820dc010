"""Checkpoints and the trust in them (paper, section 8).

``certification`` and ``gate`` decide what is captured, certified and kept. ``state`` finds a rank's state
and restores it, and ``snapshot`` copies it into memory while training goes on. ``storage`` turns it into
bytes, files and back. ``background_writer`` writes snapshots to files and hands them to ``replication``,
which copies them to another machine's memory. ``ledger`` records what is trusted. At the start of a job
``selection`` and ``resume`` decide what is loaded and bring it to each rank. Deciding and reading bytes
needs no torch.
"""
