"""The handlers of two agents in one process, over a real store."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.support.small_job import until
from tests.unit.test_policy import HANG, decided
from torchscout.decision.types import Action
from torchscout.plugins import rendezvous
from torchscout.plugins.rendezvous import ScoutRendezvous, create_handler
from torchscout.run.restart import FOLDER_VARIABLE, RestartPlan
from torchscout.utils.identity import host_name


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ScoutRendezvous]:
    """The job needs one machine; the first agent hosts the store."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    return [
        create_handler(RendezvousParameters("scout", endpoint, "job", 1, 1, is_host=is_host))
        for is_host in (True, False)
    ]


def test_a_standby_neither_restarts_nor_closes_the_job(
    agents: list[ScoutRendezvous], monkeypatch: pytest.MonkeyPatch
):
    # On a busy machine a member may leave a round and join the next one more than three seconds apart.
    monkeypatch.setattr(rendezvous, "_STANDBY_SECONDS", 60.0)
    member, standby = agents
    assert member.next_rendezvous().rank == 0
    ended: list[object] = []
    counted: list[int] = []

    def wait() -> None:
        try:
            standby.next_rendezvous()
        except SystemExit as error:
            ended.append(error.code)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until(lambda: standby._is_outside, "the second agent is a standby", 30.0)
    assert member.next_rendezvous().rank == 0, "the same agent runs the restarted job"

    def one_waits() -> bool:
        """As an agent that came while a larger job was between two rounds; torch would restart the job."""
        member._state.wait_list.add("node")  # until the state is read again, which heartbeats do
        counted.append(member.num_nodes_waiting())
        return member._inner.num_nodes_waiting() == 1

    until(one_waits, "torch counts the agent", 30.0)
    assert counted[-1] == 0
    standby.shutdown()
    time.sleep(1.5)  # torch reads the state once a second
    assert not member.is_closed()
    member.shutdown()
    waiting.join(30)
    assert ended == [0]


@pytest.fixture
def preflights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit statuses of the next preflights, the last one first. One is needed now."""
    WANTED.write(tmp_path)
    statuses: list[int] = []
    monkeypatch.setattr(rendezvous, "preflight", lambda *_: (statuses.pop(), "It is hot."))
    return statuses


WANTED = RestartPlan().after(replace(decided(HANG), action=Action.PREFLIGHT, hosts=(host_name(),)))


def test_a_machine_joins_after_its_preflight(
    agents: list[ScoutRendezvous], preflights: list[int], tmp_path: Path
):
    """Also if it cannot decide. There is one preflight for each decision."""
    agent, _ = agents
    preflights[:] = [2, 0]
    for left in (1, 1):
        assert agent.next_rendezvous().rank == 0
        assert len(preflights) == left
    WANTED.after(WANTED.restarts[0]).write(tmp_path)
    assert agent.next_rendezvous().rank == 0
    assert preflights == []
    WANTED.after(WANTED.restarts[0]).after(decided(HANG)).write(tmp_path)
    agent.next_rendezvous()
    agent.shutdown()


def test_a_machine_that_fails_its_preflight_is_quarantined(
    agents: list[ScoutRendezvous], preflights: list[int]
):
    agent, other = agents
    preflights[:] = [1]

    def join() -> None:
        with pytest.raises(SystemExit):
            agent.next_rendezvous()

    waiting = threading.Thread(target=join, daemon=True)
    waiting.start()
    until(lambda: bool(other._quarantine.hosts()), "the machine is quarantined", 30.0)
    assert other._quarantine.hosts() == {host_name(): "Its preflight failed: It is hot."}
    agent.set_closed()
    waiting.join(30)
    assert not waiting.is_alive()
