"""The handlers of two agents in one process, over a real store."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.support.small_job import until
from torchscout.decision.recovery.restart_plan import FOLDER_VARIABLE
from torchscout.plugins import rendezvous
from torchscout.plugins.rendezvous import ScoutRendezvous, create_handler


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
