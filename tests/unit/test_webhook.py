"""Incidents are posted to a webhook once, by one rank, and nothing of it reaches training."""

from __future__ import annotations

import json
import logging
import socket
import threading
from dataclasses import replace

import pytest

from tests.support.http_server import http_server
from tests.support.small_job import until
from tests.unit.test_record import INCIDENT
from torchscout.notify import Webhook, message_of

SECRET = "/services/T000/B000/xyz-secret"
HOSTILE = 'rank <!channel> & <http://x|y> "\n\x1b[31m\u202etxt'


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_an_incident_is_posted_as_json_with_a_text_for_slack():
    with http_server() as received:
        webhook = Webhook(received.url + SECRET, rank=INCIDENT.logged_by)
        webhook(INCIDENT)
        webhook.close()
    assert received.paths == [SECRET]
    assert received.types == ["application/json"]
    (body,) = map(json.loads, received.bodies)
    assert body == message_of(INCIDENT)
    assert body["text"].startswith(f"torchscout: incident ({INCIDENT.manifestation.value}) at step ")
    assert body["text"].endswith(INCIDENT.sentence)
    assert (body["ranks"], body["hosts"]) == ([*INCIDENT.ranks], [*INCIDENT.hosts])
    assert (body["scope"], body["action"]) == (INCIDENT.scope.value, INCIDENT.action.value)
    assert "records" not in body


def test_only_the_rank_that_logs_an_incident_posts_it():
    with http_server() as received:
        for rank in range(4):
            webhook = Webhook(received.url, rank=rank)
            webhook(INCIDENT)
            webhook.close()
    assert len(received.paths) == 1


def test_hostile_strings_are_escaped_for_slack_and_kept_in_the_field():
    message = message_of(replace(INCIDENT, sentence=HOSTILE))
    assert message["text"].endswith('rank &lt;!channel&gt; &amp; &lt;http://x|y&gt; " [31m txt')
    assert message["sentence"] == HOSTILE
    assert json.loads(json.dumps(message)) == message


def test_a_message_stays_small_however_many_ranks_there_are():
    large = replace(INCIDENT, ranks=(*range(1, 20_000),), sentence="<" * 1_000_000)
    assert len(json.dumps(message_of(large))) < 20_000
    assert message_of(large)["rank_count"] == 19_999


def test_a_call_returns_while_the_server_takes_its_time():
    may_answer = threading.Event()

    def slow(_: int) -> int:
        may_answer.wait(30)
        return 200

    with http_server(slow) as received:
        webhook = Webhook(received.url, rank=INCIDENT.logged_by)
        webhook(INCIDENT)
        until(lambda: len(received.bodies) == 1, "the server has the request")
        webhook(INCIDENT)  # returns although the first one is not answered
        assert not may_answer.is_set()
        may_answer.set()
        webhook.close()
    assert len(received.paths) == 2


def test_when_too_many_wait_further_ones_are_dropped_with_one_line(caplog: pytest.LogCaptureFixture):
    may_answer = threading.Event()

    def slow(_: int) -> int:
        may_answer.wait(30)
        return 200

    with http_server(slow) as received:
        webhook = Webhook(received.url + SECRET, rank=INCIDENT.logged_by)
        for _ in range(200):
            webhook(INCIDENT)
        may_answer.set()
        webhook.close(30)
    assert 64 <= len(received.paths) <= 66
    (line,) = lines_of(caplog)
    assert "incidents are dropped" in line


def test_server_errors_are_retried():
    with http_server(lambda number: 503 if number < 3 else 200) as received:
        webhook = Webhook(received.url, rank=INCIDENT.logged_by, backoff_seconds=0.01)
        webhook(INCIDENT)
        webhook.close()
    assert len(received.paths) == 3
    assert len({*received.bodies}) == 1


def test_what_cannot_be_posted_is_given_up_with_one_line(caplog: pytest.LogCaptureFixture):
    with http_server(lambda _: 500) as received:
        webhook = Webhook(received.url + SECRET, rank=INCIDENT.logged_by, attempts=3, backoff_seconds=0.01)
        for _ in range(2):
            webhook(INCIDENT)
        webhook.close()
    assert len(received.paths) == 6
    (line,) = lines_of(caplog)
    assert line.endswith(
        f"webhook at {received.url}: an incident was not posted after 3 attempts: HTTP status 500"
    )
    assert "secret" not in caplog.text


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_refusal_is_not_retried(status: int, caplog: pytest.LogCaptureFixture):
    with http_server(lambda _: status) as received:
        webhook = Webhook(received.url + SECRET, rank=INCIDENT.logged_by)
        webhook(INCIDENT)
        webhook.close()
    assert len(received.paths) == 1
    assert f"HTTP status {status}" in lines_of(caplog)[0]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "{url}/other"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int, target: str, caplog: pytest.LogCaptureFixture):
    with http_server(lambda _: (status, target.format(url=received.url))) as received:
        webhook = Webhook(received.url + SECRET, rank=INCIDENT.logged_by)
        webhook(INCIDENT)
        webhook.close()
    assert received.paths == [SECRET]
    assert f"HTTP status {status}" in lines_of(caplog)[0]


def test_a_server_that_is_gone_is_one_line_without_the_path(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    webhook = Webhook(url + SECRET, rank=INCIDENT.logged_by, attempts=2, backoff_seconds=0.01)
    webhook(INCIDENT)
    webhook.close()
    (line,) = lines_of(caplog)
    assert f"{url}: an incident was not posted after 2 attempts: Connection refused" in line
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
        Webhook(url, rank=0)
    assert "secret" not in str(refused.value)
