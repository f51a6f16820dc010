"""What the files of ranks in a run directory say; damaged ones are left out."""

from __future__ import annotations

from pathlib import Path

from torchscout.run.folder import End, RankEntry, read_all


def read_roster(run_dir: Path) -> list[RankEntry]:
    return read_all(RankEntry, run_dir, str)


def read_ends(run_dir: Path) -> dict[int, End]:
    return {end.rank: end for end in read_all(End, run_dir, str)}
