"""State that differs between ranks by design names nobody and is watched; shared state is compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.owning_jobs import Owning, owning
from tests.support.ranks import LiveRanks


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(owning, 3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("job", "compared"),
    [
        (Owning(Path(), is_sliced=True), 1.0),
        (Owning(Path(), is_local=True), 0.99),
        (Owning(Path(), extra=(1,)), 0.6),
    ],
    ids=["sharded by hand", "a local bias", "a layer of one rank"],
)
def test_a_healthy_job_is_silent_and_certified(
    three: LiveRanks, job: Owning, compared: float, tmp_path: Path
):
    job = Owning(tmp_path, is_sliced=job.is_sliced, is_local=job.is_local, extra=job.extra)
    for each in three.ask(job, 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
        share = each.replay["covered"]["compared"]
        assert isinstance(share, float)
        assert share >= compared
        assert share == 1 or each.replay["covered"]["watched"]


def test_checkpoints_contain_owned_and_shared_state(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Owning(tmp_path, is_sliced=True, keeps=True), 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.status["checkpoint"]["verified"] == 15, "20 is still being sealed"


@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_flip_names_its_rank_though_state_is_sharded_by_hand(three: LiveRanks, what: str, tmp_path: Path):
    """A wrong weight is handed on to all ranks by the next update, which gathers it."""
    found = three.ask(Owning(tmp_path, is_sliced=True, flip=(2, 13, what)), 60)
    assert [each.fired for each in found] == [0, 0, 1]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert incident.records[0].surface == "state/owned"
    assert all(each.replay["certified"] == 10 for each in found)


def test_a_flip_of_what_replicas_share_names_its_rank(three: LiveRanks, tmp_path: Path):
    found = three.ask(Owning(tmp_path, is_local=True, flip=(2, 13, "exp_avg")), 60)
    assert [each.fired for each in found] == [0, 0, 1]
    incident = found[0].incidents[0]
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert all(each.replay["certified"] == 10 for each in found)
