"""Tells people about incidents: in the job's own output, and by a webhook such as those of Slack.

Each incident has an id, by which receivers drop what is repeated, and is sent once more when it is over.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from torchscout.decision.types import Incident, Manifestation, Resolved, Scope, headline
from torchscout.log import Problems
from torchscout.run.folder import Identity

__all__ = ["Poster", "Webhook", "host_of", "line_about", "message_about", "show"]

_WAITING = 64
"""Messages that wait to be posted; further ones are dropped."""
_MOST_RANKS = 256
_MOST_CHARACTERS = 3000
_TEMPORARY = {408, 425, 429}
"""HTTP errors besides 5xx after which a request is repeated."""
_ATTEMPTS = 6
_BACKOFF_SECONDS = 0.25
"""The pause after the first attempt; it doubles each time."""
_TIMEOUT_SECONDS = 10.0


def line_about(item: Incident | Resolved, run: Identity) -> str:
    """Return one line for the log and for messages."""
    if isinstance(item, Incident):
        said = headline(item)
    elif item.recovered is not None:
        said = f"recovered by going back to step {item.recovered}: {item.sentence}"
    else:
        said = f"resolved after {item.stalled_seconds:.1f} s: {item.sentence}"
    return f"{said} ({run.reference})"


def message_about(item: Incident | Resolved, run: Identity) -> dict[str, Any]:
    """Return what is posted: ``text`` for Slack, and the same as fields. It has no stacks and no records."""
    found = {
        "text": f"torchscout: {_escaped(line_about(item, run))}",
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        **run.fields,
        "step": item.step,
        "ranks": list(item.ranks[:_MOST_RANKS]),
        "rank_count": len(item.ranks),
        "sentence": item.sentence[:_MOST_CHARACTERS],
        "manifestation": item.manifestation and item.manifestation.value,
        "scope": item.scope and item.scope.value,
        "hosts": list(item.hosts[:_MOST_RANKS]),
    }
    if isinstance(item, Resolved):
        return found | {
            "id": item.incident,
            "state": item.state,
            "stalled_seconds": item.stalled_seconds,
            "recovered": item.recovered,
        }
    return found | {
        "id": item.id,
        "state": "open",
        "action": item.action.value,
        "surface": item.records[0].surface,
    }


def _escaped(text: str) -> str:
    """Return text that Slack shows as it is: no links, no mentions, no control characters."""
    plain = re.sub(r"[\s\x00-\x1f\x7f\u2028-\u202e\u2066-\u2069]+", " ", text)[:_MOST_CHARACTERS]
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where incidents are posted, each by one process of the job; pass it as ``on_incident``."""

    url: str

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a URL that is not http or https."""
        host_of(self.url)


class Poster:
    """Posts to a webhook in order, from a thread of its own.

    What cannot be posted is tried again, then dropped, and logged once. No redirect is followed. The log
    shows the host of the URL only, since the rest may be secret.
    """

    def __init__(self, webhook: Webhook, run: Identity) -> None:
        self._webhook, self._run, self._pid = webhook, run, os.getpid()
        self._problems = Problems(f"webhook at {host_of(webhook.url)}")
        self._posted: dict[str, tuple[tuple[str, ...], Manifestation, Scope]] = {}
        """What the end of an incident repeats, by id."""
        self._waiting: queue.Queue[bytes] = queue.Queue(_WAITING)
        self._opener = build_opener(_NoRedirect)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether anything waits to be posted."""
        return os.getpid() == self._pid and bool(self._waiting.unfinished_tasks)

    def post(self, item: Incident | Resolved) -> None:
        """Post this soon. Never waits."""
        if isinstance(item, Incident):
            self._posted[item.id] = item.hosts, item.manifestation, item.scope
        elif item.incident in self._posted:
            hosts, manifestation, scope = self._posted.pop(item.incident)
            item = replace(item, hosts=hosts, manifestation=manifestation, scope=scope)
        try:
            self._waiting.put_nowait(json.dumps(message_about(item, self._run)).encode())
        except queue.Full:
            self._problems.add(["incidents are dropped, because too many wait to be posted"])
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="torchscout-webhook", daemon=True)
            self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Wait until everything is posted or dropped, at most for this long."""
        deadline = time.monotonic() + seconds
        while self.is_busy and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closing.set()

    def _work(self) -> None:
        while not self._closing.is_set():
            with suppress(queue.Empty):
                body = self._waiting.get(timeout=1.0)
                try:
                    self._post(body)
                finally:
                    self._waiting.task_done()

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "torchscout"}
        request = Request(self._webhook.url, body, headers, method="POST")
        for attempt in range(1, _ATTEMPTS + 1):
            is_last = attempt == _ATTEMPTS
            try:
                with self._opener.open(request, timeout=_TIMEOUT_SECONDS):
                    return
            except HTTPError as error:
                error.close()
                problem = f"HTTP status {error.code}"
                is_last |= error.code < 500 and error.code not in _TEMPORARY
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", error)
                problem = getattr(reason, "strerror", None) or type(reason).__name__
            if is_last or self._closing.wait(_BACKOFF_SECONDS * 2 ** (attempt - 1)):
                break
        self._problems.add([f"an incident was not posted after {attempt} attempts: {problem}"])


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: a POST would become a GET, and the other server may be anything."""


def host_of(url: str) -> str:
    """Return scheme and host; raises ``ValueError``, without the path, for what cannot be posted to."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a webhook's URL begins with http:// or https:// and a host, not {parts.scheme!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a webhook's URL must not have a user name or a password")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(
            f"the webhook's URL at {parts.hostname!r} has characters that must be percent-encoded"
        )
    return f"{parts.scheme}://{parts.hostname}" + ("" if parts.port is None else f":{parts.port}")


def show(line: str, outputs: Sequence[int | str], seconds: float = 1.0) -> None:
    """Write a line to the first of these files or descriptors that can be written to, in a thread with a time
    limit: a pipe that nobody reads is full, and a file system may hang."""
    thread = threading.Thread(target=_write_to_first, args=(line, outputs), daemon=True)
    thread.start()
    thread.join(seconds)


def _write_to_first(line: str, outputs: Sequence[int | str]) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for output in outputs:
        with suppress(OSError):
            # Opened anew and closed again: a pipe that is kept open would keep ``torchrun | tee`` alive. A
            # descriptor is a regular file, whose writers share their place in it.
            file = os.dup(output) if isinstance(output, int) else os.open(output, flags)
            try:
                os.write(file, f"{line}\n".encode())
            finally:
                os.close(file)
            return
