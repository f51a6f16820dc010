"""Marks single cases of a parametrized test, next to it: by patterns of their ids.

``slow_cases("zero-3*")`` and ``long_cases(...)`` mark the cases that match, ``slow_except(...)`` those that
match none of its patterns.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest


@pytest.hookimpl(tryfirst=True)  # before they are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        case = item.name.partition("[")[2].removesuffix("]")
        for mark in [*item.iter_markers()]:
            kind, _, how = mark.name.partition("_")
            if how in ("cases", "except"):
                matches = any(fnmatchcase(case, pattern) for pattern in mark.args)
                if matches == (how == "cases"):
                    item.add_marker(kind)
