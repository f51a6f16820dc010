"""Calls a function once a module has been imported that nobody needs yet and that takes long to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` now if the module is imported already, and otherwise right after its import. Returns a
    function that ends the wait."""
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """Notices the import of one module, and leaves it to the other finders."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def remove(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != self._name:
            return None
        self.remove()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            self._action()

        loader.exec_module = exec_module
