"""Real jobs on three machines whose network is slow, loses packets, or falls apart (paper, section 7).

The machines are network namespaces. The hub is on the first one and its standby on the third.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hangs import incidents, resolutions
from tests.support.machines import INTERFACE, Machine, machines, why_impossible
from tests.support.small_job import until
from torchscout.decision.types import Manifestation, Scope

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible())),
]

HOSTS = {name: ["127.0.0.1 localhost"] for name in ("one", "two", "three")}
RANKS = ("01", "23", "45")


def start(
    hosts: list[Machine], run_dir: Path, stalls: str, **variables: str
) -> list[subprocess.Popen[bytes]]:
    """Two ranks on each machine."""
    common = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29511",
        "WORLD_SIZE": "6",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = [sys.executable, "-m", "tests.support.spread_job", str(run_dir), stalls]
    return [
        host.start([*command, *ranks], run_dir / f"output-{host.name}", **{**common, **variables})
        for host, ranks in zip(hosts, RANKS, strict=True)
    ]


@contextmanager
def degraded(hosts: list[Machine], *, delay: float, loss: float) -> Iterator[None]:
    links = [host.degrade(delay=delay, loss=loss) for host in hosts]
    try:
        yield
        assert [link.poll() for link in links] == [None] * len(links)
    finally:
        for link in links:
            link.kill()
            link.wait()


def on_its_way(run_dir: Path) -> None:
    paths = [run_dir / f"connected-{rank}" for rank in range(6)]
    until(lambda: all(path.exists() and path.read_text() for path in paths), "the job is on its way", 90.0)


def observers(host: Machine) -> list[int]:
    return host.processes("torchscout.observer.process")


@pytest.mark.parametrize("stalls", ["2", "none"])
def test_over_a_slow_network_that_loses_packets(tmp_path: Path, stalls: str):
    """A round trip takes 100 ms more, and one packet of fifty is lost on each link."""
    patience = {"MIN_SILENCE": "4", "GIVE_UP_SECONDS": "60"}
    with machines(tmp_path, HOSTS) as hosts, degraded(hosts, delay=0.025, loss=0.02):
        started = start(hosts, tmp_path, stalls, **patience)
        assert [each.wait(150) for each in started] == [0, 0, 0], (tmp_path / "output-two").read_text()
    found = [(each.manifestation, each.scope, each.ranks, each.hosts) for each in incidents(tmp_path)]
    assert found == ([(Manifestation.HANG, Scope.RANK, (2,), ("two",))] if stalls == "2" else [])
    assert [each.ranks for each in resolutions(tmp_path)] == ([(2,)] if stalls == "2" else [])


@pytest.mark.parametrize("ends", ["killed", "unplugged"])
def test_a_lost_hub_host_is_named_by_the_standby_and_nobody_else_is(tmp_path: Path, ends: str):
    with machines(tmp_path, HOSTS) as hosts:
        start(hosts, tmp_path, "nobody")
        on_its_way(tmp_path)
        hosts[0].kill() if ends == "killed" else hosts[0].unplug()
        until(lambda: named(tmp_path), "the standby has concluded")
        until(lambda: not any(observers(host) for host in hosts), "the observers leave", 60.0)
    assert named(tmp_path) == {(Scope.MACHINE, (0, 1), ("one",))}
    assert {each.scope for each in incidents(tmp_path)} <= {Scope.MACHINE, Scope.JOB}, "the rest is undecided"


def named(run_dir: Path) -> set[tuple[Scope, tuple[int, ...], tuple[str, ...]]]:
    """What was named; the minority that is cut off knows that it cannot name anybody."""
    found = incidents(run_dir)
    return {(each.scope, each.ranks, each.hosts) for each in found if each.scope is not Scope.JOB}
