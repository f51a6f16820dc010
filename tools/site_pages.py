"""A hook of MkDocs: pages from outside of docs/, and links to files that are not part of the site.

README.md and others are written for readers of the repository. The site shows them as pages of its own. A
link from any page to a file that is not on the site becomes the file's path in the repository.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""The pages from elsewhere, by their path in the repository."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.plugins.torchscout")  # in strict mode a warning here fails the build


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    source = PurePosixPath(_SOURCES.get(name, f"docs/{name}"))
    return _LINK.sub(lambda link: _rewritten(link, source, name), markdown)


def _rewritten(link: re.Match[str], source: PurePosixPath, page: str) -> str:
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if not target or ":" in target:
        return link[0]
    path = os.path.normpath(source.parent / target)
    if not (ROOT / path).exists():
        _log.warning(f"{source} has a link to {target}, which does not exist")
    where = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if where is None:
        plain = f"`{path}`"
        return plain if text.strip("`") == path else f"{text} ({plain})"
    return f"{mark}[{text}]({os.path.relpath(where, PurePosixPath(page).parent)}{anchor})"
