"""What the table of frameworks says is what is installed, accepted and tested."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchscout.adapters.versions import TESTED, untried

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks" / "README.md"
COLUMNS = ("torchtitan", "megatron", "deepspeed", "huggingface")


def rows_of(heading: str, page: Path = PAGE) -> list[list[str]]:
    """The cells of the table with this first heading, without the heading itself."""
    lines = page.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = lines[first + 2 :]
    end = next(place for place, line in enumerate([*table, ""]) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:end]]


RELEASES = {row[1].split()[0]: row for row in rows_of("framework") if row[1]}


def test_the_table_has_every_framework_that_is_known():
    assert RELEASES.keys() == TESTED.keys()


@pytest.mark.parametrize("distribution", TESTED)
def test_the_tested_release_is_the_one_that_is_installed_and_pinned(distribution: str):
    documented = RELEASES[distribution][1].split()[1]
    assert documented == TESTED[distribution] == version(distribution)
    assert f"\n{distribution}=={documented}\n" in (ROOT / "requirements-dev.txt").read_text()


@pytest.mark.parametrize("distribution", TESTED)
def test_what_is_accepted_is_what_the_extra_installs(distribution: str):
    _, release, accepted, install, guide = RELEASES[distribution]
    series = accepted.removesuffix(" or newer")
    extra = re.search(r"torchscout\[(\w+)\]", install)[1]
    declared = re.search(
        rf"^optional-dependencies\.{extra} = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M
    )[1]
    (wanted,) = [
        Requirement(each)
        for each in re.findall(r'"([^"]+)"', declared)
        if each.startswith(f"{distribution}>")
    ]
    for tried, is_known in ((release.split()[1], True), (f"{series}.999", True), (_after(series), False)):
        assert tried in wanted.specifier
        assert (untried(distribution, tried) is None) is is_known, tried
    assert (PAGE.parent / re.search(r"\((\w+\.md)\)", guide)[1]).is_file()


def _after(series: str) -> str:
    *before, last = series.split(".")
    return ".".join([*before, str(int(last) + 1), "0"])


def test_torch_is_the_one_that_is_installed():
    assert f"torch {version('torch').split('+')[0]}" in PAGE.read_text()


def test_the_table_of_pytorch_versions_has_every_series_that_is_accepted():
    """One column for each, and a cell in every row."""
    page = ROOT / "docs" / "replay.md"
    heading = next(line for line in page.read_text().splitlines() if line.startswith("| parallelism | 2."))
    documented = [cell.strip() for cell in heading.strip("|").split("|")][1:]
    declared = re.search(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    accepted = [f"2.{minor}" for minor in range(30) if f"2.{minor}.0" in Requirement(declared).specifier]
    assert documented == accepted
    rows = rows_of("parallelism | 2.10", page)
    assert len(rows) >= 6
    assert all(all(row) and len(row) == 1 + len(documented) for row in rows)


@pytest.mark.parametrize("place", range(len(COLUMNS)), ids=COLUMNS)
def test_every_layout_in_the_table_is_a_test(place: int):
    name = COLUMNS[place]
    files = [
        ROOT / "tests" / "frameworks" / f"test_{name}.py",
        *(ROOT / "tests" / "support").glob(f"{name}_layouts.py"),
    ]
    source = "".join(each.read_text() for each in files)
    documented = [each for row in rows_of("parallelism") for each in re.findall(r"`([^`]+)`", row[place + 1])]
    assert len(documented) >= 3
    missing = [each for each in documented if f'"{each}"' not in source and f"def {each}(" not in source]
    assert missing == []
