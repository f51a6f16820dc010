"""Machines and devices have names that an operator can act on."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.run_dirs import read_roster
from torchscout.report.standing import standing
from torchscout.run.folder import RankEntry
from torchscout.utils.identity import HOST_VARIABLES, device_name, host_name, is_host_name
from torchscout.utils.network import interface_of_job


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch):
    for variable in (*HOST_VARIABLES, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)


def test_a_machine_is_named_by_setting_then_scheduler_then_hostname(monkeypatch: pytest.MonkeyPatch):
    assert host_name() == socket.gethostname()
    for variable in reversed(HOST_VARIABLES):
        monkeypatch.setenv(variable, f"of-{variable}")
        assert host_name() == f"of-{variable}"


@pytest.mark.parametrize("name", ["a b", "a,b", "-x", "a\nb", "a/b", "$(id)", "x" * 256])
def test_what_cannot_be_a_name_is_ignored_with_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert not is_host_name(name)
    monkeypatch.setenv("TORCHSCOUT_HOST", name)
    monkeypatch.setenv("NODE_NAME", "node-7.example")
    with caplog.at_level(logging.WARNING, "torchscout"):
        assert host_name() == "node-7.example"
    assert "is not the name of a machine" in caplog.text


def test_a_device_is_named_as_far_as_it_is_known():
    whole = SimpleNamespace(uuid="0a1b-2c", pci_domain_id=0, pci_bus_id=0x65, pci_device_id=0)
    assert device_name(whole).startswith("GPU-0a1b-2c, PCI 0000:65:00.0")
    assert device_name(SimpleNamespace(uuid="GPU-0a1b-2c")) == "GPU-0a1b-2c"
    assert device_name(SimpleNamespace()) == ""


def test_the_interface_of_the_job(monkeypatch: pytest.MonkeyPatch):
    assert interface_of_job() == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_of_job() == "ib0"


def test_the_roster_has_both_names_and_status_recognizes_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A shell in which the scheduler's variables are not set is still on this machine."""
    monkeypatch.setenv("SLURMD_NODENAME", "node-7")
    replace(RankEntry.own(0, tmp_path / "record", 1), device="GPU-1", interface="eth0").write(tmp_path)
    monkeypatch.delenv("SLURMD_NODENAME")
    (entry,) = read_roster(tmp_path)
    assert (entry.host, entry.hostname, entry.is_here) == ("node-7", socket.gethostname(), True)
    line = standing(entry)
    assert (line["host"], line["device_name"], line["interface"]) == ("node-7", "GPU-1", "eth0")
    assert line["state"] != "elsewhere"
    assert not replace(entry, hostname="another").is_here
    (tmp_path / "ranks" / "rank-0.json").write_text(
        json.dumps({"rank": 0, "host": "h", "pid": 1, "record": "r"})
    )
    assert read_roster(tmp_path)[0].hostname == "", "an entry of an earlier version is read"
