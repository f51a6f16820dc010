"""Commands that read other users' jobs or answer other machines never end in a traceback."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from tests.support.run_dirs import read_roster
from tests.support.small_job import until
from tests.unit.test_record import INCIDENT
from torchscout.cli.doctor import network
from torchscout.cli.main import app
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds import protocol
from torchscout.run.folder import RankEntry
from torchscout.run.writer import RunWriter


def test_the_status_of_a_record_that_is_not_this_users_alone(tmp_path: Path):
    writer = ProgressWriter.create(tmp_path / "records", 0)
    RankEntry.own(0, writer.path).write(tmp_path)
    RunWriter(tmp_path, 0).record(INCIDENT)
    writer.path.chmod(0o644)
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
    writer.close()
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert report["ranks"][0]["state"].startswith("unknown: ")
    assert report["incidents"][0]["sentence"] == INCIDENT.sentence


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, "{}", json.dumps({"rank": "0", "host": "h", "pid": 1, "record": "r"})]
    + [json.dumps({"rank": 0, "host": socket.gethostname(), "pid": 1, "record": each}) for each in (5,)],
)
def test_the_status_of_a_damaged_run(tmp_path: Path, text: str):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").write_text(text)
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert "rank-0.json" in "".join(done.output.split()).replace("│", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_status_of_another_users_run(tmp_path: Path):
    (tmp_path / "ranks").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises((PermissionError, ValueError)):
            read_roster(tmp_path)
    finally:
        os.seteuid(0)


def test_a_client_that_disconnects_before_the_answer_does_not_end_the_doctor():
    ports: list[int] = []
    visits: list[network.Visit] = []
    failures: list[Exception] = []

    def listen() -> None:
        try:
            visits.extend(network.serve("127.0.0.1", 0, {}, time.monotonic() + 4, ports.append))
        except zmq.ZMQError as error:
            failures.append(error)

    doctor = threading.Thread(target=listen)
    doctor.start()
    (port,) = until(lambda: ports, "it listens")
    context: zmq.Context = zmq.Context()
    for rank in range(8):
        client = protocol.connect(context, network._PUBLIC_TOKEN, rank, ("127.0.0.1", port))
        assert client.poll(5000, zmq.POLLOUT)
        for _ in range(50):
            client.send(protocol.encode("hello", host="visitor", versions={}))
        client.close(linger=100)
    doctor.join()
    context.destroy(linger=0)
    assert failures == []
    assert visits
