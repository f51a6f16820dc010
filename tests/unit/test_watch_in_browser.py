"""The page of ``scout watch`` in a real browser: headless Chromium. See ``tests.support.browser``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium, watched
from tests.unit.test_report import write_run
from tests.unit.test_watch import TOKEN, add_incident, served
from torchscout.report.server import ReportServer

WITHIN = 20_000
"""Milliseconds to wait for what comes by itself; two seconds are required of a machine that is not busy."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@contextmanager
def opened(
    browser: Any, run_dir: Path, token: str | None = None, **settings: Any
) -> Iterator[tuple[Any, ReportServer]]:
    """Open the live page. Fails if it logs, raises, or requests anything but its own server."""
    with served(run_dir, token=token) as server, watched(browser, server.url, **settings) as (shown, said):
        yield shown, server
        own = server.url.partition("?")[0]
        assert [each for each in said if not each.startswith(own)] == []
        assert not any(TOKEN in each for each in said[1:]), "only the link has the token"


@pytest.mark.parametrize("width", [1440, 390])
def test_a_new_incident_comes_on_the_page_by_itself(width: int, browser: Any, tmp_path: Path):
    write_run(tmp_path)
    with opened(browser, tmp_path, viewport={"width": width, "height": 900}) as (shown, _):
        assert shown.locator("#incidents li").count() == 2
        assert "Live" in shown.locator("#live").inner_text()
        add_incident(tmp_path, "Rank 3 disagrees.")
        shown.get_by_text("Rank 3 disagrees.").first.wait_for(timeout=WITHIN)
        assert shown.locator("#incidents li").count() == 3
        assert "1 new incident" in shown.locator("#live").inner_text()
        assert shown.locator("#mesh .cell.mark-sdc").count() == 2
        shown.locator("#live a").click()
        assert shown.url.endswith("#incident-3")
        assert shown.title().startswith("(2) ")


def test_what_a_reader_has_opened_stays_open(browser: Any, tmp_path: Path):
    write_run(tmp_path)
    with opened(browser, tmp_path) as (shown, _):
        shown.locator("#mesh-mark").select_option("1")
        shown.locator('#mesh [data-rank="2"]').click()
        shown.locator("#incident-2 details summary").last.click()
        shown.locator("#incident-2 details[open]").last.wait_for()
        opened_before = shown.locator("#incident-2 details[open]").count()
        shown.locator('#mesh [data-rank="2"]').focus()
        add_incident(tmp_path, "Rank 3 disagrees.")
        shown.locator("#incident-3").wait_for(timeout=WITHIN)
        assert "Rank 2" in shown.locator("#mesh .detail").inner_text()
        assert shown.locator("#mesh-mark").input_value() == "1"
        assert shown.locator("#incident-2 details[open]").count() == opened_before
        assert shown.evaluate("document.activeElement.getAttribute('data-rank')") == "2"


def test_a_page_that_is_opened_before_the_run_shows_it_later(browser: Any, tmp_path: Path):
    run_dir = tmp_path / "run"
    with opened(browser, run_dir) as (shown, _):
        assert "is no run directory yet" in shown.locator("#now").inner_text()
        assert "No ranks are recorded." in shown.locator("#mesh").inner_text()
        write_run(run_dir)
        shown.locator("#mesh .cell.mark-sdc").wait_for(timeout=WITHIN)
        shown.locator("#coverage table").first.wait_for(timeout=WITHIN)
        shown.get_by_text("Finished, step 12; 1 open incident.").wait_for(timeout=WITHIN)


def test_damage_is_announced_and_withdrawn(browser: Any, tmp_path: Path):
    write_run(tmp_path)
    path = tmp_path / "incidents" / "rank-0.jsonl"
    whole = path.read_bytes()
    with opened(browser, tmp_path) as (shown, _):
        path.write_bytes(whole[:-25])
        shown.get_by_role("note").wait_for(timeout=WITHIN)
        assert shown.locator("#incidents li").count() == 1
        path.write_bytes(whole)
        shown.get_by_role("note").wait_for(state="detached", timeout=WITHIN)
        assert shown.locator("#incidents li").count() == 2


def test_a_token_is_needed_and_a_wrong_one_refused(browser: Any, tmp_path: Path):
    write_run(tmp_path)
    with opened(browser, tmp_path, TOKEN) as (shown, server):
        add_incident(tmp_path, "Rank 3 disagrees.")
        shown.get_by_text("Rank 3 disagrees.").first.wait_for(timeout=WITHIN)
        other = browser.new_page()
        for query in ("", "?token=wrong", f"?token={TOKEN}x"):
            answer = other.goto(server.url.partition("?")[0] + query)
            assert answer.status == 403
            assert "Rank" not in other.content()
        other.close()


@pytest.mark.parametrize(
    "text",
    ["</script><script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "\x1b[31m \u202e"],
    ids=["script", "image", "terminal"],
)
def test_hostile_texts_that_arrive_later_are_inert(text: str, browser: Any, tmp_path: Path):
    write_run(tmp_path, host=text)
    with opened(browser, tmp_path, viewport={"width": 390, "height": 900}) as (shown, _):
        add_incident(tmp_path, f"Rank 3: {text}")
        shown.locator("#incident-3").wait_for(timeout=WITHIN)
        assert shown.evaluate("window.pwned") is None
        assert shown.locator("img").count() == 0
        assert shown.locator("script").count() == 2
        said = shown.locator("#incidents .sentence").last.inner_text()
        assert said == f"Rank 3: {text}".replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")


def test_a_page_in_the_background_draws_long_views_once_when_it_is_seen_again(browser: Any, tmp_path: Path):
    """A hidden tab gets no frames. Here they are kept back until the end."""
    write_run(tmp_path)
    hide = "() => { window.kept = []; window.requestAnimationFrame = (frame) => window.kept.push(frame); }"
    with served(tmp_path) as server, watched(browser, server.url) as (shown, _):
        shown.evaluate(hide)
        for place in range(3):
            add_incident(tmp_path, f"Rank 3 disagrees, time {place}.")
            shown.locator("#incidents").get_by_text(f"Rank 3 disagrees, time {place}.").first.wait_for()
        assert shown.evaluate("() => window.kept.length") == 1
        shown.evaluate("() => window.kept.forEach((frame) => frame())")
        shown.locator("#evidence").get_by_text("Rank 3 disagrees, time 2.").first.wait_for()
