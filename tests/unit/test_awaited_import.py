"""What is done once a module has been imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchscout.observer.phase_hooks import when_imported

NAME = "imported_late"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)
    assert sys.meta_path == finders


def test_it_is_done_once_after_the_import(module: Path):
    module.write_text("value = 1\n")
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(sys.modules[NAME].value))
    assert seen == []
    for _ in range(2):
        importlib.import_module(NAME)
    assert seen == [1]
    importlib.reload(sys.modules[NAME])
    assert seen == [1]


def test_it_is_done_at_once_for_a_module_that_is_there(module: Path):
    module.write_text("")
    importlib.import_module(NAME)
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    assert seen == [1]


def test_it_is_not_done_after_the_wait_was_ended(module: Path):
    module.write_text("")
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))()
    importlib.import_module(NAME)
    assert seen == []


@pytest.mark.parametrize("text", [None, "raise RuntimeError('broken')\n"], ids=["missing", "broken"])
def test_a_module_that_cannot_be_imported_fails_as_usual(module: Path, text: str | None):
    if text is not None:
        module.write_text(text)
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    with pytest.raises(ModuleNotFoundError if text is None else RuntimeError):
        importlib.import_module(NAME)
    assert seen == []
