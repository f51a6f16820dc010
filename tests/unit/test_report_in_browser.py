"""The report in a real browser: headless Chromium, without a network. See ``tests.support.browser``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium, watched
from tests.support.example_run import write_example_run
from tests.support.incidents import incident_from
from tests.support.large_run import HUNG, LARGE, SLOW, write_large_run
from tests.unit.test_report import stuck, write_run
from torchscout.report.document import documented
from torchscout.report.page import page
from torchscout.run.writer import RunWriter


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@contextmanager
def opened(browser: Any, run_dir: Path, **settings: Any) -> Iterator[Any]:
    """Open the report on a run. Fails if the page logs, raises, requests anything or exceeds the screen."""
    target = run_dir.parent / "report.html"
    target.write_text(page(documented(run_dir)))
    with watched(browser, target.as_uri(), **settings) as (shown, said):
        yield shown
        assert said == [target.as_uri()]


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_named_rank_its_evidence_and_the_way_back(width: int, scheme: str, browser: Any, tmp_path: Path):
    write_run(tmp_path / "run")
    with opened(
        browser, tmp_path / "run", viewport={"width": width, "height": 900}, color_scheme=scheme
    ) as shown:
        first = shown.locator("#incidents li").first
        assert "Rank 2 disagrees." in first.inner_text()
        assert "host node-1, device cuda:0" in first.inner_text()
        assert "Replace machine node-1." in first.inner_text()
        cell = shown.locator("#mesh .cell.mark-sdc")
        assert cell.get_attribute("data-rank") == "2"
        assert cell.inner_text().split() == ["C", "2"], "a letter, and not only a colour"
        assert shown.locator("#mesh .cell.mark-waits").count() == 2
        assert "rank 1" in shown.locator("#incident-2 svg.waits").text_content()
        first.get_by_role("link").click()
        assert shown.url.endswith("#incident-1")
        shown.locator("#incident-1").get_by_role("link", name="back to the summary").click()
        assert shown.url.endswith("#incidents")
        assert shown.locator("#timeline .line-verified").count() == 2, "the drawing and its key"
        assert shown.locator("#strip-0 .dot-out").count() == 1
        assert "the kernel is not deterministic" in shown.locator("#coverage").inner_text()


def test_the_keyboard_reaches_ranks(browser: Any, tmp_path: Path):
    write_run(tmp_path / "run")
    with opened(browser, tmp_path / "run") as shown:
        shown.locator("#mesh .cell").first.focus()
        shown.keyboard.press("ArrowDown")
        shown.keyboard.press("ArrowDown")
        shown.keyboard.press("Enter")
        assert "Rank 2" in shown.locator("#mesh .detail").inner_text()
        assert shown.locator("#mesh .detail a").first.get_attribute("href") == "#incident-1"


@pytest.mark.parametrize("width", [1440, 390])
def test_stacks_of_named_and_of_waiting_ranks_are_both_in_sight(width: int, browser: Any, tmp_path: Path):
    write_example_run(tmp_path / "run")
    with opened(browser, tmp_path / "run", viewport={"width": width, "height": 900}) as shown:
        named, waiting = shown.locator("#incident-3 .sides > div").all()
        for side, title, ranks, function in [
            (named, "Named", "rank 6", "in read_shard"),
            (waiting, "Waiting", "ranks 0\u20132", "in all_reduce"),
        ]:
            assert side.get_by_role("heading").inner_text() == title
            assert side.locator("summary").inner_text() == ranks
            assert function in side.locator("pre").inner_text()
        left, right = named.bounding_box(), waiting.bounding_box()
        if width == 1440:
            assert right["x"] >= left["x"] + left["width"]
            assert right["y"] == left["y"]
        else:
            assert right["x"] == left["x"]
            assert right["y"] >= left["y"] + left["height"]


def write_hang(run_dir: Path, named: tuple[int, ...]) -> None:
    """With the stacks of ranks 0 and 1, of which no record says who waits."""
    records = tuple(stuck("coordinate", (rank,), [4], "Main thread") for rank in (0, 1))
    recorder = RunWriter(run_dir, 0)
    recorder.record(replace(incident_from(records[0], named), records=records))
    recorder.close()


def test_a_rank_that_is_not_known_to_wait_is_not_said_to_wait(browser: Any, tmp_path: Path):
    write_hang(tmp_path / "run", (1,))
    with opened(browser, tmp_path / "run") as shown:
        assert shown.locator(".sides h5").all_inner_texts() == ["Named", "Not named"]


def test_stacks_are_in_one_column_if_nobody_is_named(browser: Any, tmp_path: Path):
    write_hang(tmp_path / "run", ())
    with opened(browser, tmp_path / "run") as shown:
        (side,) = shown.locator(".sides > div").all()
        assert side.get_by_role("heading").count() == 0
        assert side.locator("pre").inner_text() == "Main thread"
        assert side.bounding_box()["width"] == shown.locator(".sides").bounding_box()["width"]


@pytest.mark.long
def test_a_large_job_opens_from_machines_to_ranks(browser: Any, tmp_path: Path):
    write_large_run(tmp_path / "run", LARGE)
    with opened(browser, tmp_path / "run") as shown:
        assert shown.locator("#mesh .tile").count() == LARGE // 8
        assert f"node-{HUNG // 8:04d}" in shown.locator("#mesh .tile").first.inner_text()
        shown.locator("#mesh .tile").first.click()
        assert shown.locator("#mesh .drilled .cell").count() == 8
        shown.locator(f'#mesh .drilled [data-rank="{HUNG}"]').click()
        assert "killed after step 40" in shown.locator("#mesh .detail").inner_text()
        shown.locator("#mesh-by").select_option("replica")
        shown.locator("#mesh .tile").first.click()
        assert shown.locator("#mesh .drilled .cell").count() == 256
        shown.locator("#find-rank").fill(str(SLOW))
        shown.keyboard.press("Enter")
        assert f"node-{SLOW // 8:04d}" in shown.locator("#mesh .detail").inner_text()
        assert "16,383 ranks" in shown.locator("#incident-2 svg.waits").text_content()


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>window.pwned=1</script>",
        "<img src=x onerror=window.pwned=1>",
        "\"><svg onload=window.pwned=1>'",
        "\x1b[31mred\x1b[0m \u202egnp.exe",
        "n" * 10_000,
    ],
    ids=["script", "image", "quotes", "terminal", "long"],
)
def test_hostile_texts_are_shown_as_they_are(text: str, browser: Any, tmp_path: Path):
    write_run(tmp_path / "run", host=text)
    with opened(browser, tmp_path / "run", viewport={"width": 390, "height": 900}) as shown:
        assert shown.evaluate("window.pwned") is None
        assert shown.locator("script").count() == 2
        assert shown.locator("img").count() == 0
        where = shown.locator("#incidents .where").first.inner_text()
        assert "\x1b" not in where
        assert "\u202e" not in where
        begin = text.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")[:80]
        assert begin in where


def test_damage_is_announced_at_the_top(browser: Any, tmp_path: Path):
    write_run(tmp_path / "run")
    with (tmp_path / "run" / "incidents" / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "kind": "incid')
    with opened(browser, tmp_path / "run") as shown:
        assert "could not be read" in shown.get_by_role("note").inner_text()
        assert "rank-0.jsonl" in shown.locator("#problems").inner_text()
        assert shown.locator("#incidents li").count() == 2
