"""As ``tests/ranks/test_deaths``, over NCCL: the other ranks do not fail, but wait until their launcher ends
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.test_deaths import Death, seen_everywhere
from tests.support.dying_job import EXCEPTION

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
DEATHS = [
    Death("killed", "was killed by SIGKILL", "killed"),
    Death("aborts", "was ended by SIGABRT", "killed"),
    Death("raises", EXCEPTION, "failed"),
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.how)
def test_a_death_over_nccl_is_seen_everywhere(death: Death, tmp_path: Path, alone: dict[str, str]):
    seen_everywhere(death, tmp_path, DYING_BACKEND="nccl", **alone)
