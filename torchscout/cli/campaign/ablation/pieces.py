"""The pieces of the method that are left out, one at a time, and which cells each has to do with."""

from __future__ import annotations

from dataclasses import dataclass

from torchscout.cli.campaign.cell import Row

__all__ = ["EVERYTHING", "PIECES", "ROWS", "Piece", "pieces_for"]

EVERYTHING = "everything"
"""The key of what the whole method decides."""

ROWS = (
    Row("sdc", "SDC", "one forward output or parameter of one rank"),
    Row("nondeterminism", "Nondeterministic kernel", "other ranks differ each time: nobody is sick"),
    Row("straggler", "Compute straggler", "one rank's layers take 250 ms longer"),
    Row("transient", "Slow once", "one rank's layers take 250 ms longer in one step: nobody is sick"),
    Row("clean", "Fault-free", "nothing"),
    Row("hang", "Hang and input stall", "one rank late, frozen, without input, or in another collective"),
    Row("hang-clean", "Fault-free, observed", "nothing"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that the method has, and what is done in its place."""

    key: str
    title: str
    instead: str
    rows: tuple[str, ...]
    """Of the cells that can tell the difference."""


PIECES = (
    Piece(
        "majority",
        "Majority",
        "whoever reports first is blamed: the first to write down that numbers differ, or the first whose "
        "collective times out",
        ("sdc", "clean", "hang", "hang-clean"),
    ),
    Piece(
        "confirmation",
        "Confirmation",
        "one replay that differs, or one slow round, is enough",
        ("sdc", "nondeterminism", "straggler", "transient", "clean"),
    ),
    Piece(
        "wait_graph",
        "Wait graph",
        "whoever stands elsewhere than the majority of its peers is blamed",
        ("hang", "hang-clean"),
    ),
    Piece(
        "controlled_replay",
        "Controlled replay",
        "each rank's own step times are compared, with the same rule and confirmations",
        ("straggler", "transient", "clean"),
    ),
    Piece(
        "observer",
        "Out-of-band observer",
        "a thread of the trainer, conferring by an all-gather on a group of its own",
        ("hang", "hang-clean"),
    ),
    Piece(
        "observer_posting",
        "Out-of-band observer, posts kept",
        "a thread of the trainer, conferring by posts that are read after a deadline",
        ("hang", "hang-clean"),
    ),
)


def pieces_for(row: str) -> list[str]:
    """The keys of those that a cell of this row has to do with."""
    return [piece.key for piece in PIECES if row in piece.rows]
