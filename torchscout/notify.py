"""Posts incidents to a webhook, such as those of Slack, as JSON."""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import threading
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from torchscout.decision.types import Incident, headline
from torchscout.log import Problems

__all__ = ["Webhook", "host_of", "message_of"]

_WAITING = 64
"""Incidents that wait to be posted; further ones are dropped."""
_MOST_RANKS = 256
_MOST_CHARACTERS = 3000
_TEMPORARY = {408, 425, 429}
"""HTTP errors besides 5xx after which a request is repeated."""
_LONGEST_PAUSE_SECONDS = 60.0
_EXIT_SECONDS = 5.0


class Webhook:
    """Pass it as ``on_incident``. Each incident is posted once, by one rank, from a thread of its own.

    What cannot be posted is tried again, then dropped, and logged once. No redirect is followed. The log
    shows the host of the URL only, since the rest may be secret.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 10.0,
        attempts: int = 4,
        backoff_seconds: float = 1.0,
        rank: int | None = None,
    ) -> None:
        """``rank`` is this process's, by default that of torch.distributed.

        Between attempts it pauses for ``backoff_seconds``, then for twice as long, and so on. Raises
        ``ValueError`` for a URL that is not http or https.
        """
        host = host_of(url)
        if attempts < 1 or timeout_seconds <= 0 or backoff_seconds < 0:
            given = f"{attempts}, {timeout_seconds}, {backoff_seconds}"
            raise ValueError(f"attempts and seconds must be positive, got {given}")
        self._url, self._timeout = url, timeout_seconds
        self._attempts, self._backoff = attempts, backoff_seconds
        self._rank, self._pid = _own_rank() if rank is None else rank, os.getpid()
        self._problems = Problems(f"rank {self._rank}: webhook at {host}")
        self._waiting: queue.Queue[Incident] = queue.Queue(_WAITING)
        self._opener = build_opener(_NoRedirect)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def __call__(self, incident: Incident) -> None:
        """Post this incident soon, if this rank is the one that does. Never waits."""
        if incident.logged_by != self._rank:
            return
        try:
            self._waiting.put_nowait(incident)
        except queue.Full:
            self._problems.add(["incidents are dropped, because too many wait to be posted"])
            return
        if self._thread is None:
            atexit.register(self.close)
            self._thread = threading.Thread(target=self._run, name="torchscout-webhook", daemon=True)
            self._thread.start()

    def close(self, seconds: float = _EXIT_SECONDS) -> None:
        """Wait until everything is posted or dropped, at most for this long. Called when Python exits."""
        deadline = time.monotonic() + seconds
        if os.getpid() == self._pid:
            while self._waiting.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.02)
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                incident = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            try:
                self._post(json.dumps(message_of(incident)).encode())
            finally:
                self._waiting.task_done()

    def _post(self, body: bytes) -> None:
        problem: str | None = None
        for attempt in range(1, self._attempts + 1):
            problem, is_temporary = self._attempt(body)
            if problem is None:
                return
            if not is_temporary:
                break
            pause = min(self._backoff * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
            if attempt < self._attempts and self._closing.wait(pause):
                break
        self._problems.add([f"an incident was not posted after {attempt} attempts: {problem}"])

    def _attempt(self, body: bytes) -> tuple[str | None, bool]:
        """Return what went wrong, and whether it may go well later."""
        headers = {"Content-Type": "application/json", "User-Agent": "torchscout"}
        request = Request(self._url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout):
                return None, False
        except HTTPError as error:
            error.close()
            return f"HTTP status {error.code}", error.code >= 500 or error.code in _TEMPORARY
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            detail = reason.strerror if isinstance(reason, OSError) else None
            return detail or type(reason).__name__, True


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: a POST would become a GET, and the other server may be anything."""


def message_of(incident: Incident) -> dict[str, Any]:
    """Return what is posted: ``text`` for Slack, and the same as fields. It has no stacks and no records."""
    return {
        "text": f"torchscout: {_escaped(headline(incident))}",
        "manifestation": incident.manifestation.value,
        "scope": incident.scope.value,
        "step": incident.step,
        "ranks": list(incident.ranks[:_MOST_RANKS]),
        "rank_count": len(incident.ranks),
        "hosts": list(incident.hosts[:_MOST_RANKS]),
        "action": incident.action.value,
        "surface": incident.records[0].surface,
        "sentence": incident.sentence[:_MOST_CHARACTERS],
    }


def _escaped(text: str) -> str:
    """Return text that Slack shows as it is: no links, no mentions, no control characters."""
    plain = re.sub(r"[\s\x00-\x1f\x7f\u2028-\u202e\u2066-\u2069]+", " ", text)[:_MOST_CHARACTERS]
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
