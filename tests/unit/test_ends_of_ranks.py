"""Which ranks have ended as they should, by the run directory."""

from __future__ import annotations

from pathlib import Path

from torchscout.run.folder import End, How, RankEntry, read_departed


def test_ranks_that_finished_or_were_asked_to_end_in_this_session_have_departed(tmp_path: Path):
    ends: list[tuple[How, str]] = [
        ("finished", "now"),
        ("interrupted", "now"),
        ("failed", "now"),
        ("killed", "now"),
        ("interrupted", "earlier"),
    ]
    assert read_departed(tmp_path) == []
    for rank, (how, record) in enumerate(ends):
        RankEntry(rank, "host", 1, "now").write(tmp_path)
        End(rank, how, 3, record).write(tmp_path)
    RankEntry(5, "host", 1, "now").write(tmp_path)
    assert read_departed(tmp_path) == [0, 1]
