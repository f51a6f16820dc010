"""`scout watch`: the live document, who may read it, and the terminal."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.incidents import incident_from
from tests.support.run_dirs import read_roster
from tests.support.small_job import until
from tests.unit.test_report import HOSTILE, numbers, write_run
from torchscout.cli.main import app
from torchscout.cli.watch import Window
from torchscout.decision.types import Trust
from torchscout.report.live import LiveRun
from torchscout.report.screen import watch_screen
from torchscout.report.server import ReportServer
from torchscout.run.folder import Unwatched
from torchscout.run.writer import RunWriter, record_one

TOKEN = "a-token-of-this-test"


@contextmanager
def served(run_dir: Path, address: str = "127.0.0.1", token: str | None = None) -> Iterator[ReportServer]:
    with ReportServer(LiveRun(run_dir), address, 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: ReportServer, path: str = "/data.json", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=given)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def add_incident(run_dir: Path, sentence: str) -> None:
    recorder = RunWriter(run_dir, 0)
    recorder.record(incident_from(numbers(step=11), (3,), sentence=sentence))
    recorder.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_what_has_changed_is_sent_and_nothing_is_written(tmp_path: Path):
    write_run(tmp_path)
    live, before = LiveRun(tmp_path), contents(tmp_path)
    first = live.changes()
    assert len(first["parts"]["incidents"]) == 2
    assert first["parts"]["now"]["state"] == "finished"
    assert live.changes(first["version"]) == {"version": first["version"], "parts": {}}
    assert contents(tmp_path) == before
    add_incident(tmp_path, "Rank 3 disagrees.")
    second = live.changes(first["version"])
    assert second["parts"]["incidents"][-1]["sentence"] == "Rank 3 disagrees."
    assert "coverage" not in second["parts"]
    for unknown in ("", "other-1", "x", f"{first['version'].partition('-')[0]}-" + "9" * 40):
        assert live.changes(unknown)["parts"].keys() == live.document().keys()


def test_a_rank_that_loses_its_observer_is_shown(tmp_path: Path):
    write_run(tmp_path)
    live = LiveRun(tmp_path)
    assert "observed for hangs: 4 of 4 ranks" in watch_screen(live.document())
    Unwatched(2, read_roster(tmp_path)[2].record).write(tmp_path)
    until(lambda: "observed for hangs: 3 of 4 ranks" in watch_screen(live.document()), "it is read")
    assert "not watched for hangs any more: rank 2" in watch_screen(live.document())


def test_a_run_directory_that_does_not_exist_yet(tmp_path: Path):
    run_dir = tmp_path / "later"
    live = LiveRun(run_dir)
    assert "is no run directory yet" in live.document()["now"]["sentence"]
    assert not run_dir.exists()
    write_run(run_dir)
    until(lambda: live.document()["now"]["state"] == "finished", "the run has begun")
    until(lambda: live.document()["coverage"], "its records are read")
    assert len(live.document()["incidents"]) == 2


def test_half_a_line_is_noted_until_it_is_whole(tmp_path: Path):
    write_run(tmp_path)
    path, live = tmp_path / "incidents" / "rank-0.jsonl", LiveRun(tmp_path)
    add_incident(tmp_path, "Rank 3 disagrees.")
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    document = live.document()
    assert len(document["incidents"]) == 2
    assert any("incidents/rank-0.jsonl" in each for each in document["problems"])
    path.write_bytes(whole)
    document = live.document()
    assert len(document["incidents"]) == 3
    assert document["problems"] == []


def test_the_page_and_what_has_changed_are_served(tmp_path: Path):
    write_run(tmp_path)
    with served(tmp_path) as server:
        answer, body = ask(server, "/")
        assert answer.status == 200
        assert b"Rank 2 disagrees." in body
        header = str(answer.headers["Content-Security-Policy"])
        assert "default-src 'none'" in header
        assert "connect-src 'self'" in header
        assert "frame-ancestors 'none'" in header
        assert "unsafe" not in header
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers
        answer, body = ask(server)
        version = json.loads(body)["version"]
        assert answer.headers["Content-Type"] == "application/json"
        assert json.loads(ask(server, f"/data.json?after={version}")[1])["parts"] == {}
        assert ask(server, "/../../etc/passwd")[0].status == 404
        assert ask(server, "/incidents/rank-0.jsonl")[0].status == 404


def test_only_get_is_allowed(tmp_path: Path):
    write_run(tmp_path)
    with served(tmp_path) as server:
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"):
            answer, _ = ask(server, method=method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET"), method


def test_a_wrong_or_missing_token_is_refused(tmp_path: Path):
    write_run(tmp_path)
    with served(tmp_path, token=TOKEN) as server:
        for path in ("/", "/data.json", "/other"):
            for query in ("", "?token=", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}", "?token=%ff%00"):
                answer, body = ask(server, path + query)
                assert answer.status == 403, query
                assert b"Rank" not in body
        assert ask(server, Authorization="Bearer wrong")[0].status == 403
        assert ask(server, f"/?token={TOKEN}")[0].status == 200
        assert ask(server, Authorization=f"Bearer {TOKEN}")[0].status == 200
        assert f"?token={TOKEN}" in server.url
        assert TOKEN not in ask(server, f"/?token={TOKEN}")[1].decode(), "a saved page has no token"


def test_another_address_needs_a_token(tmp_path: Path):
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 can be reached from other machines"):
        ReportServer(LiveRun(tmp_path), "0.0.0.0", 0)


def test_a_name_that_was_rebound_to_this_address_is_refused(tmp_path: Path):
    own = ("localhost:8642", "127.0.0.1", "[::1]:1")
    others = ("evil.example", "evil.example:8642", "127.0.0.1.evil.example", "10.1.2.3", "[", "")
    write_run(tmp_path)
    with served(tmp_path) as server:
        assert {ask(server, Host=host)[0].status for host in own} == {200}
        assert {ask(server, Host=host)[0].status for host in others} == {421}
    with served(tmp_path, "0.0.0.0", TOKEN) as server:
        hosts = ("10.1.2.3", socket.gethostname(), "evil.example")
        found = [ask(server, f"/?token={TOKEN}", Host=host)[0].status for host in hosts]
        assert found == [200, 200, 421]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_other_users_of_this_machine_need_a_token(tmp_path: Path):
    write_run(tmp_path)
    for token, status in ((None, 0), (TOKEN, 200)):
        with served(tmp_path, token=token) as server:
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                os.setuid(65534)
                try:
                    answered = ask(server, f"/?token={TOKEN}")[0].status
                except (ConnectionError, http.client.HTTPException):
                    answered = 0
                os.write(writing, str(answered).encode())
                os._exit(0)
            assert int(os.read(reading, 9)) == status
            os.waitpid(child, 0)
            os.close(reading)
            os.close(writing)


def test_requests_are_bounded(tmp_path: Path):
    write_run(tmp_path)
    with served(tmp_path) as server:
        assert ask(server, X_Long="x" * 20_000)[0].status == 431
        assert ask(server, "/" + "x" * 20_000)[0].status == 431
        assert ask(server, Content_Length="5")[0].status == 413
        assert ask(server, Transfer_Encoding="chunked")[0].status == 413
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(80)]
        refused = [each for each in silent[64:] if each.recv(1) == b""]
        assert len(refused) == 16, "further connections are closed at once"
        for each in silent:
            each.close()
        until(lambda: ask(server)[0].status == 200, "there is room again")


@contextmanager
def started(*arguments: object, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torchscout", "watch", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_the_command_prints_where_and_ends_with_ctrl_c(address: str, tmp_path: Path):
    write_run(tmp_path)
    with started(tmp_path, "--port", 0, "--address", address) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        (port,) = re.findall(r":(\d+)/", line)
        token = re.findall(r"\?token=(\S{32})", line)
        assert len(token) == (address == "0.0.0.0")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", "/data.json" + "".join(f"?token={each}" for each in token))
        assert connection.getresponse().status == 200
        connection.request("GET", "/data.json")
        assert connection.getresponse().status == (403 if token else 200)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_wrong_options_are_refused(tmp_path: Path):
    for option in (["--token", "short"], ["--port", "70000"], ["--address", "no such address"]):
        assert CliRunner().invoke(app, ["watch", str(tmp_path), *option]).exit_code == 2


def test_a_terminal_of_80_columns_loses_nothing(tmp_path: Path):
    write_run(tmp_path, host="a-long-name-of-a-machine-in-a-large-cluster.example.org")
    long = "Rank 3 disagrees with 127 others about " + "layers.31.attention/output, " * 8 + "at the end."
    add_incident(tmp_path, long)
    document = LiveRun(tmp_path).document()
    text = watch_screen(document, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    flat = "".join(text.split())
    for each in document["incidents"]:
        assert "".join(each["sentence"].split()) in flat
        assert "".join(each["todo"].split()) in flat
    for word in ("verified", "layer.0", "the kernel is not deterministic", "4 finished", "of 4 ranks"):
        assert "".join(word.split()) in flat
    assert flat.count("a-long-name-of-a-machine-in-a-large-cluster.example.org-1") == 2


def test_only_a_job_that_keeps_checkpoints_shows_some(tmp_path: Path):
    write_run(tmp_path)
    assert "CHECKPOINTS: after the check of step 7" in watch_screen(LiveRun(tmp_path).document())
    record_one(
        tmp_path, 0, Trust(step=9, latest=None, candidate=None, verified=8, poisoned=None, is_kept=False)
    )
    shown = watch_screen(LiveRun(tmp_path).document())
    assert "STATE: after the check of step 9" in shown
    assert "certified step 8" in shown
    assert not any(word in shown for word in ("CHECKPOINTS", "latest", "verified"))


def test_texts_of_records_do_not_reach_the_terminal_as_commands(tmp_path: Path):
    write_run(tmp_path, host=HOSTILE)
    shown = CliRunner().invoke(app, ["watch", str(tmp_path), "--tui"])
    assert shown.exit_code == 0, "without a terminal it prints once"
    assert "Rank 2 disagrees." in shown.output
    assert "\x1b" not in shown.output
    assert "\\u001b[31m" in shown.output
    assert "\x1b" not in CliRunner().invoke(app, ["status", str(tmp_path)]).output


def test_a_window_moves_within_its_lines():
    window, text = Window(), "\n".join(map(str, range(20)))

    def shown(key: str) -> tuple[str, str]:
        window.press(key, 6, 20)
        *lines, _ = window.lines(text, 6)
        return lines[0], lines[-1]

    assert [shown(key) for key in "gGkgk"] == [("0", "4"), ("15", "19"), ("14", "18"), ("0", "4"), ("0", "4")]
    assert window.lines("0", 3)[:2] == ["0", ""]


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_the_terminal_follows_the_run_until_a_key_ends_it(key: bytes, tmp_path: Path):
    write_run(tmp_path)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "60"}
    command = [sys.executable, "-m", "torchscout", "watch", str(tmp_path), "--tui"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            shown = read_until(ours, b"", b"Rank 1 is late.")
            assert b"q ends" in read_until(ours, shown, b"q ends")
            add_incident(tmp_path, "Rank 3 disagrees.")
            read_until(ours, b"", b"Rank 3 disagrees.")
            os.write(ours, key)
            # Ctrl-C is a signal from the terminal's driver where the terminal is the process's own.
            if key == b"\x03":
                process.send_signal(signal.SIGINT)
            read_to_the_end(ours)
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(ours)


def read_until(file: int, seen: bytes, text: bytes) -> bytes:
    deadline = time.monotonic() + 60
    while text not in seen and time.monotonic() < deadline:
        if select.select([file], [], [], 1.0)[0]:
            seen += os.read(file, 1 << 16)
    assert text in seen
    return seen


def read_to_the_end(file: int) -> None:
    try:
        while os.read(file, 1 << 16):
            pass
    except OSError:  # the other side is closed
        return
