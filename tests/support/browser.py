"""Headless Chromium for tests. A module that imports this one is skipped where there is no browser.

Needs ``pip install "torchscout[browser-tests]"`` and Debian's ``chromium``, or one that CHROMIUM names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium in PATH; set CHROMIUM", allow_module_level=True)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")


@contextmanager
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=[*QUIET])
        yield started
        started.close()


@contextmanager
def watched(browser: Any, url: str, **settings: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page, and yield it with what it logs, raises, asks and requests."""
    shown = browser.new_page(**settings)
    said: list[str] = []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("dialog", lambda dialog: said.append(dialog.message))
    shown.on("request", lambda request: said.append(request.url))
    shown.goto(url)
    try:
        yield shown, said
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        shown.close()
