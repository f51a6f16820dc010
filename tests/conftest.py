"""Marks single cases of a parametrized test by patterns of their ids, and skips what this machine lacks.

``slow_cases("zero-3*")`` and ``long_cases(...)`` mark the cases that match, ``slow_except(...)`` those that
match none of its patterns.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import pytest
import torch

_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.hookimpl(tryfirst=True)  # before they are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    used: dict[tuple[str, str], bool] = {}
    for item in items:
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        for mark in [*item.iter_markers()]:
            kind, _, how = mark.name.partition("_")
            if how in ("cases", "except"):
                matching = {pattern for pattern in mark.args if fnmatchcase(case, pattern)}
                used |= {
                    (test, each): used.get((test, each), False) or each in matching for each in mark.args
                }
                if bool(matching) == (how == "cases"):
                    item.add_marker(kind)
        if item.get_closest_marker("gpu") is not None and (missing := _missing(item)):
            item.add_marker(pytest.mark.skip(reason=missing))
    unused = [f"{test}: {pattern}" for (test, pattern), is_used in used.items() if not is_used]
    if unused and not any("::" in each for each in config.args):  # where all cases are collected
        raise pytest.UsageError(f"patterns that match no case: {'; '.join(unused)}")


def _missing(item: pytest.Item) -> str | None:
    """``@pytest.mark.nccl(ranks)`` asks for NCCL ranks."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    nccl = item.get_closest_marker("nccl")
    if nccl and torch.cuda.device_count() < nccl.args[0] and os.environ.get(_SHARED) != "1":
        return f"needs {nccl.args[0]} CUDA devices, or NCCL 2.30 and {_SHARED}=1"
    return None
