"""An interrupted discovery goes on where it stopped, and only where nothing has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiled_matmul import TiledMatmul
from torchscout.errors import CatalogError
from torchscout.experts.coverage import Observed
from torchscout.experts.discovery import discover

SHAPES = [(rows,) for rows in range(12)]


def interrupted_after(shapes: int):
    left = [shapes]

    def progress(seen: Observed) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_discovery_goes_on_and_finds_the_same(tmp_path: Path):
    journal = tmp_path / "up.jsonl"
    odd = {"uncountable": frozenset({(2,)}), "unstable": frozenset({(7,)})}
    with pytest.raises(KeyboardInterrupt):
        discover(TiledMatmul(**odd), SHAPES, on_progress=interrupted_after(5), resume_from=journal)
    with journal.open("a") as file:
        file.write('{"rows":[5],"finger')  # as a killed writer leaves it

    second, shown = TiledMatmul(**odd), []
    found = discover(second, SHAPES, on_progress=shown.append, resume_from=journal)
    assert set(second.executed) == set(SHAPES[5:])
    assert tuple(shown) == found == discover(TiledMatmul(**odd), SHAPES)

    third = TiledMatmul(**odd)
    assert discover(third, SHAPES, resume_from=journal) == found
    assert not third.executed


def test_a_journal_of_other_facts_is_refused_and_says_which(tmp_path: Path):
    journal = tmp_path / "up.jsonl"
    discover(TiledMatmul(), SHAPES, resume_from=journal)
    before = journal.read_bytes()
    other = replace(TiledMatmul(), tile=8)
    with pytest.raises(CatalogError, match="another discovery: tile was '4' and is '8'"):
        discover(other, SHAPES, resume_from=journal)
    assert not other.executed
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ["rows", "{}\n", '{"kind":"x","schema":1,"facts":{}}\n', "[1]\n", "first\nand a second without end"],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, text: str):
    (tmp_path / "notes").write_text(text)
    with pytest.raises(CatalogError, match="is not a"):
        discover(TiledMatmul(), SHAPES, resume_from=tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == text


def test_a_damaged_line_is_named(tmp_path: Path):
    for written, changed in (('"counts"', '"count"'), ('"rows":[2]', '"rows":[3]')):
        journal = tmp_path / f"{changed[1:5]}.jsonl"
        discover(TiledMatmul(), SHAPES, resume_from=journal)
        lines = journal.read_text().splitlines()
        lines[3] = lines[3].replace(written, changed)
        journal.write_text("\n".join(lines) + "\n")
        with pytest.raises(CatalogError, match=r"\.jsonl:4 is damaged"):
            discover(TiledMatmul(), SHAPES, resume_from=journal)


def test_a_journal_without_digests_is_read_and_continued(tmp_path: Path):
    journal, whole = tmp_path / "up.jsonl", discover(TiledMatmul(), SHAPES)
    with pytest.raises(KeyboardInterrupt):
        discover(TiledMatmul(), SHAPES, on_progress=interrupted_after(5), resume_from=journal)
    old = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in old:
        del line["digest"]
    old[0]["schema"] = 1
    journal.write_text("".join(json.dumps(line) + "\n" for line in old))
    profiler = TiledMatmul()
    assert discover(profiler, SHAPES, resume_from=journal) == whole
    assert set(profiler.executed) == set(SHAPES[5:])
    assert discover(TiledMatmul(), SHAPES, resume_from=journal) == whole
