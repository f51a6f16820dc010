"""A job listens on no more addresses than its ranks need."""

from __future__ import annotations

import pytest

from torchscout.utils import network
from torchscout.utils.network import listening_address


def test_a_job_on_one_machine_listens_on_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert listening_address(["a", "a"], 1) == ("127.0.0.1", "127.0.0.1")


def test_a_job_on_several_machines_listens_where_the_others_reach_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "_addresses_towards", lambda _: iter(["127.0.0.1", "192.0.2.7"]))
    assert listening_address(["a", "b"], 0) == ("192.0.2.7", "192.0.2.7")


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_all_interfaces_are_used_only_on_request(monkeypatch: pytest.MonkeyPatch, everywhere: str):
    monkeypatch.setattr(network, "_addresses_towards", lambda _: iter(["192.0.2.7"]))
    assert listening_address(["a", "b"], 0, everywhere) == (everywhere, "192.0.2.7")
    assert listening_address(["a", "b"], 0, "192.0.2.9") == ("192.0.2.9", "192.0.2.9")
