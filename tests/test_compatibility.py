"""The release of a framework that was tried is the one that is installed, and that the extra accepts."""

from __future__ import annotations

import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchscout.adapters.versions import TESTED, untried

PINNED = (Path(__file__).parents[1] / "requirements-dev.txt").read_text()


@pytest.mark.parametrize("distribution", TESTED)
def test_the_tried_release_is_installed_pinned_and_accepted(distribution: str):
    tried = TESTED[distribution]
    assert version(distribution) == tried
    assert re.search(rf"^{distribution}=={re.escape(tried)}$", PINNED, re.MULTILINE)
    assert untried(distribution, tried) is None
    declared = [each for each in map(Requirement, requires("torchscout") or ()) if each.name == distribution]
    assert declared
    assert all(tried in each.specifier for each in declared)
