"""Incidents are posted to a webhook in order, and nothing of it reaches training."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import replace
from datetime import datetime

import pytest

from tests.support.http_server import Received, http_server
from tests.support.small_job import until
from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.types import Incident, Resolved
from torchscout.run import notify
from torchscout.run.folder import Identity
from torchscout.run.notify import Poster, Webhook, message_about

SECRET = "/services/T000/B000/xyz-secret"
HOSTILE = 'rank <!channel> & <http://x|y> "\n\x1b[31m\u202etxt'


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_BACKOFF_SECONDS", 0.01)


RUN = Identity("/runs/7", "start", job="llama", launcher="Slurm job 4711")


def post(received: Received, *items: Incident | Resolved) -> None:
    poster = Poster(Webhook(received.url + SECRET), RUN)
    for each in items or (INCIDENT,):
        poster.post(each)
    poster.close(30)


def test_an_incident_and_its_end_are_posted_in_order_with_the_identity_of_the_run():
    with http_server() as received:
        post(received, INCIDENT, RESOLVED)
    assert received.paths == [SECRET] * 2
    assert received.types == ["application/json"] * 2
    body, end = map(json.loads, received.bodies)
    assert (body["id"], body["state"]) == (INCIDENT.id, "open")
    assert (end["id"], end["state"], end["stalled_seconds"]) == (INCIDENT.id, "resolved", 12.5)
    for each in (body, end):
        assert (each["job"], each["launcher"], each["run_dir"]) == ("llama", "Slurm job 4711", "/runs/7")
        assert each["command"] == "scout status /runs/7"
        assert abs(datetime.fromisoformat(each["time"]).timestamp() - time.time()) < 30
        assert "Slurm job 4711" in each["text"]
        assert (each["ranks"], each["hosts"]) == ([*INCIDENT.ranks], [*INCIDENT.hosts])
        assert each["manifestation"] == INCIDENT.manifestation.value
        assert each["scope"] == INCIDENT.scope.value
    for fact in (INCIDENT.manifestation.value, f"step {INCIDENT.step}", INCIDENT.sentence):
        assert fact in body["text"]
    assert body["action"] == INCIDENT.action.value
    assert "records" not in body


def test_hostile_strings_are_escaped_for_slack_and_kept_in_the_field():
    message = message_about(replace(INCIDENT, sentence=HOSTILE), RUN)
    assert ('rank &lt;!channel&gt; &amp; &lt;http://x|y&gt; " [31m txt') in message["text"]
    assert message["sentence"] == HOSTILE
    assert json.loads(json.dumps(message)) == message


def test_a_message_stays_small_however_many_ranks_there_are():
    large = replace(INCIDENT, ranks=(*range(1, 20_000),), sentence="<" * 1_000_000)
    assert len(json.dumps(message_about(large, RUN))) < 20_000
    assert message_about(large, RUN)["rank_count"] == 19_999


class Slow:
    """A server that answers when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def __call__(self, _: int) -> int:
        self.may_answer.wait(30)
        return 200


def test_a_call_returns_while_the_server_takes_its_time():
    slow = Slow()
    with http_server(slow) as received:
        webhook = Poster(Webhook(received.url), RUN)
        webhook.post(INCIDENT)
        until(lambda: len(received.bodies) == 1, "the server has the request")
        webhook.post(INCIDENT)  # returns although the first one is not answered
        assert not slow.may_answer.is_set()
        slow.may_answer.set()
        webhook.close()
    assert len(received.paths) == 2


def test_when_too_many_wait_further_ones_are_dropped_with_one_line(caplog: pytest.LogCaptureFixture):
    slow = Slow()
    with http_server(slow) as received:
        webhook = Poster(Webhook(received.url + SECRET), RUN)
        for _ in range(200):
            webhook.post(INCIDENT)
        slow.may_answer.set()
        webhook.close(30)
    assert 64 <= len(received.paths) <= 66
    (line,) = lines_of(caplog)
    assert "dropped" in line


def test_server_errors_are_retried():
    with http_server(lambda number: 503 if number < 3 else 200) as received:
        post(received)
    assert len(received.paths) == 3
    assert len({*received.bodies}) == 1


def test_what_cannot_be_posted_is_given_up_with_one_line(caplog: pytest.LogCaptureFixture):
    with http_server(lambda _: 500) as received:
        post(received, INCIDENT, INCIDENT)
    assert len(received.paths) == 12
    (line,) = lines_of(caplog)
    for fact in (received.url, "6 attempts", "500"):
        assert fact in line
    assert "secret" not in caplog.text


def test_a_refusal_is_not_retried(caplog: pytest.LogCaptureFixture):
    for status in (400, 403, 404, 410):
        caplog.clear()
        with http_server(lambda _, status=status: status) as received:
            post(received)
        assert len(received.paths) == 1
        assert str(status) in lines_of(caplog)[0]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "{url}/other"])
def test_no_redirect_is_followed(target: str):
    for status in (301, 302, 303, 307, 308):
        with http_server(lambda _, status=status: (status, target.format(url=received.url))) as received:
            post(received)
        assert received.paths == [SECRET]


def test_a_server_that_is_gone_is_one_line_without_the_path(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = Received(taken.getsockname()[1])
    post(gone)
    (line,) = lines_of(caplog)
    for fact in (gone.url, "6 attempts", "Connection refused"):
        assert fact in line
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://host/secret", "hooks.slack.com/secret", "https:///secret", ""),
        *(
            "https://user:secret@host/x",
            "https://host/se cret",
            "https://host/secret\n",
            "https://host/ü-secret",
        ),
        "https://host:port/secret",
    ],
)
def test_a_wrong_url_is_refused_without_showing_its_path(url: str):
    with pytest.raises(ValueError, match=r"webhook|[Pp]ort") as refused:
        Webhook(url)
    assert "secret" not in str(refused.value)
