"""A real job on two machines, each with its own network: the hub is reached from both (paper, section 7)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hangs import incidents, resolutions
from tests.support.machines import INTERFACE, OTHER_INTERFACE, Machine, machines, why_impossible
from tests.support.small_job import until
from torchscout.decision.types import Manifestation, Scope

pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))

NAMED = {
    "one": ["127.0.0.1 localhost", "127.0.1.1 one", "10.77.0.2 two"],
    "two": ["127.0.0.1 localhost", "127.0.1.1 two", "10.77.0.1 one"],
}
"""As many distributions have it: a machine's own name means the machine itself, and no network."""
UNNAMED = {name: ["127.0.0.1 localhost"] for name in NAMED}
"""As in many containers: a machine's name means nothing, not even to itself."""


UNSHARED = 'test "$(hostname)" = one || mount --bind "$0-of-two" "$0"; exec "$@"'
"""A command of the second machine has a run directory of its own, under the same name."""


def start(
    hosts: list[Machine], run_dir: Path, stalls: str = "nobody", *, shared: bool = True, **variables: str
) -> list[subprocess.Popen[bytes]]:
    """Ranks 0 and 1 on the first machine, 2 and 3 on the second."""
    command = [sys.executable, "-m", "tests.support.spread_job", str(run_dir), stalls]
    command = command if shared else ["sh", "-e", "-c", UNSHARED, str(run_dir), *command]
    common = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29511",
        "WORLD_SIZE": "4",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    return [
        host.start([*command, *ranks], run_dir / f"output-{host.name}", **{**common, **variables})
        for host, ranks in zip(hosts, ("01", "23"), strict=True)
    ]


def connected(run_dir: Path) -> list[str]:
    """What each rank's observer said of its connections to the hub and the standby."""
    paths = [run_dir / f"connected-{rank}" for rank in range(4)]
    until(lambda: all(path.exists() and path.read_text() for path in paths), "the job is on its way", 300.0)
    return [path.read_text() for path in paths]


@pytest.mark.long_cases("no-names")
@pytest.mark.parametrize(
    ("names", "variables"),
    [
        pytest.param(UNNAMED, {}, id="no-names"),
        pytest.param(NAMED, {"MASTER_ADDR": "one"}, id="own-name-is-loopback", marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_on_another_machine_than_the_hub_is_named(
    tmp_path: Path, names: dict[str, list[str]], variables: dict[str, str]
):
    with machines(tmp_path, names) as hosts:
        started = start(hosts, tmp_path, stalls="2", **variables)
        assert connected(tmp_path) == [str([True, True])] * 4
        assert [each.wait(300) for each in started] == [0, 0], (tmp_path / "output-two").read_text()
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.scope) == (Manifestation.HANG, Scope.RANK)
    assert (incident.ranks, incident.hosts) == ((2,), ("two",))
    (resolved,) = resolutions(tmp_path)
    assert resolved.ranks == (2,)


@pytest.mark.slow
def test_without_a_shared_run_directory_the_callback_is_called_once_on_each_rank(tmp_path: Path):
    run_dir, other, reports = tmp_path / "run", tmp_path / "run-of-two", tmp_path / "reports"
    for folder in (run_dir, other, reports):
        folder.mkdir()
    with machines(tmp_path, UNNAMED) as hosts:
        started = start(hosts, run_dir, stalls="0", shared=False, REPORTS=str(reports))
        assert [each.wait(300) for each in started] == [0, 0], (run_dir / "output-two").read_text()
    for folder in (run_dir, other):  # the hub's machine has it in its files, and the other one a copy
        assert [each.ranks for each in incidents(folder)] == [(0,)]
        assert [each.ranks for each in resolutions(folder)] == [(0,)]
    assert not list((run_dir / "ranks").glob("rank-[23].json")), "the other machine has files of its own"
    assert [(reports / f"incidents-{rank}").read_text() for rank in range(4)] == ["hang (0,)\n"] * 4


@pytest.mark.slow
def test_the_hub_listens_on_the_configured_interface_and_is_reached_there(tmp_path: Path):
    with machines(tmp_path, UNNAMED) as hosts:
        start(hosts, tmp_path, HUB_ADDRESS=OTHER_INTERFACE)
        assert connected(tmp_path) == [str([True, True])] * 4
        assert all(host.listens_on(host.other_address) for host in hosts)


@pytest.mark.slow
def test_a_partitioned_network_leaves_each_side_with_a_verdict(tmp_path: Path):
    with machines(tmp_path, UNNAMED) as hosts:
        start(hosts, tmp_path)
        connected(tmp_path)
        hosts[0].unplug()
        until(lambda: len(incidents(tmp_path)) == 2, "both hubs have concluded")
        found = {incident.hosts: incident for incident in incidents(tmp_path)}
        for host, ranks in (("one", (0, 1)), ("two", (2, 3))):
            incident = found[(host,)]
            assert (incident.scope, incident.ranks) == (Scope.MACHINE, ranks)
        until(
            lambda: not any(observers(host) for host in hosts),
            "the observers leave, whether or not they were answered",
        )
    assert len(incidents(tmp_path)) == 2, "that the trainers gave up is no news"


@pytest.mark.slow
def test_a_machine_that_dies_with_its_hub_leaves_an_incident_behind(tmp_path: Path):
    with machines(tmp_path, UNNAMED) as hosts:
        start(hosts, tmp_path)
        connected(tmp_path)
        hosts[0].kill()
        until(lambda: incidents(tmp_path), "the standby has concluded")
        until(lambda: not observers(hosts[1]), "the observers leave")
    found = incidents(tmp_path)
    # Not those whose trainers ended with it. A second round may see more, and say so in other words.
    assert {each.ranks for each in found} == {(0, 1)}, [each.sentence for each in found]


def observers(host: Machine) -> list[int]:
    return host.processes("torchscout.observer.process")
