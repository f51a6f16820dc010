"""Copies in another machine's memory are received where the job's address setting says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchscout.communicators import Job
from torchscout.mesh import Mesh
from torchscout.session.checkpoints.replication import StateReplication

HOSTS = ("a", "b")


def replication(folder: Path, address: str, hosts: tuple[str, ...] = HOSTS) -> StateReplication:
    job = Job(0, Mesh.grid(replica=2), hosts, "0123456789abcdef", folder, address)
    return StateReplication(job, folder, wanted=True)


@pytest.fixture
def own_address() -> str:
    """An address of this machine by which others could reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but selects a route
        except OSError:
            pytest.skip("needs a network interface besides loopback")
        return str(probe.getsockname()[0])


def test_a_replicator_listens_at_the_address_that_was_set_and_nowhere_else(tmp_path: Path, own_address: str):
    found = replication(tmp_path, own_address)
    try:
        assert found.address is not None, found.problem
        host, port = found.address
        assert host == own_address
        socket.create_connection((own_address, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        found.close()


def test_an_address_that_this_machine_does_not_have_costs_the_copies_and_not_the_job(tmp_path: Path):
    found = replication(tmp_path, "203.0.113.9")
    assert found.replicator is None
    assert found.address is None
    assert "no copies are kept in other machines' memory" in str(found.problem)


def test_ranks_of_one_machine_need_no_address(tmp_path: Path):
    assert replication(tmp_path, "*", ("a", "a")).replicator is None
