"""Takes the picture of a report for README: docs/images/report.png.

    python tools/report_picture.py [--folder DIR]

Needs ``pip install "torchscout[browser-tests]"`` and ``chromium``. With ``--folder``, writes pictures of the
report and the live page at 1,440 and 390 pixels, light and dark, to look at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.browser import chromium  # noqa: E402
from tests.support.example_run import write_example_run  # noqa: E402
from tests.unit.test_watch import served  # noqa: E402
from torchscout.report.document import documented  # noqa: E402
from torchscout.report.page import page  # noqa: E402

TARGET = ROOT / "docs" / "images" / "report.png"
SIZE = {"width": 1000, "height": 1200}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary, chromium() as browser:
        run_dir = Path(temporary) / "scout-run-20261116-150559-3fa9c1"
        write_example_run(run_dir)
        document = {**documented(run_dir), "run_dir": run_dir.name}
        report = Path(temporary) / "report.html"
        report.write_text(page(document))
        if folder is None:
            take(browser, report.as_uri(), TARGET, "light", SIZE, whole=False)
            return
        with served(run_dir) as server:
            for kind, url in (("report", report.as_uri()), ("live", server.url)):
                for width in (1440, 390):
                    for scheme in ("light", "dark"):
                        size = {"width": width, "height": 900}
                        take(browser, url, folder / f"{kind}-{width}-{scheme}.png", scheme, size, whole=True)


def take(browser: Any, url: str, target: Path, scheme: str, size: dict[str, int], *, whole: bool) -> None:
    shown = browser.new_page(viewport=size, color_scheme=scheme)
    shown.goto(url)
    shown.screenshot(path=target, full_page=whole)
    shown.close()
    print(target)


if __name__ == "__main__":
    main()
