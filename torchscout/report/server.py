"""Serves the report of a run, live, to a browser: GET only, from memory, with nothing from other hosts.

    /            the page, with the document as it is now
    /data.json   what has changed after a version: ``?after=VERSION``

A page of another site that a browser shows cannot read any of it: such a request has that site's name in its
``Host`` header, if the name was rebound to this machine's address, and no answer permits another origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

from torchscout.report.live import LiveRun
from torchscout.report.page import page, policy
from torchscout.utils import procfs

__all__ = ["ReportServer", "is_loopback"]

_MOST_HEAD_BYTES = 16 << 10
_MOST_REQUESTS = 64
"""Requests at the same time; further ones are closed."""
_TIMEOUT_SECONDS = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class ReportServer(ThreadingHTTPServer):
    """Answers requests until it is shut down."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, run: LiveRun, address: str, port: int, token: str | None = None) -> None:
        """Raises ``ValueError`` for an address that others reach without a token, and ``OSError`` if it is
        not available."""
        if token is None and not is_loopback(address):
            raise ValueError(f"{address} can be reached from other machines, which needs a token")
        if ":" in address:
            self.address_family = socket.AF_INET6
        self.run, self.token = run, token
        own = socket.gethostname().lower()
        self._names = {address.lower(), "localhost", own, own.partition(".")[0]}
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__((address, port), _Request)

    @property
    def url(self) -> str:
        """Where to find the page, with the token if there is one."""
        host = str(self.server_address[0])
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    def admits(self, host: str) -> bool:
        """Return whether a ``Host`` header names this machine. A name that was rebound does not."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            given = ipaddress.ip_address(name)
        except ValueError:
            return False
        return given.is_loopback or not is_loopback(str(self.server_address[0]))

    def server_bind(self) -> None:
        """Bind without looking up names, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Without a token, refuse the other users of this machine, who may not read the files either."""
        if self.token is not None:
            return True
        owner = procfs.owner_of_connection(client_address[1], self.server_port)
        return owner in {os.geteuid(), 0}

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the other side has just left."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Head:
    """Reads the head of a request; raises ``ValueError`` if it is too large."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, _MOST_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        line = self._file.readline(min(limit if limit >= 0 else self._left + 1, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ValueError("the head of the request is too large")
        return line

    def close(self) -> None:
        self._file.close()


class _Request(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "scout", ""
    timeout = _TIMEOUT_SECONDS
    command, request_version, requestline = "", "HTTP/1.0", ""
    close_connection = True

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ValueError as error:
            self.close_connection = True
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error))

    def do_GET(self) -> None:
        if not self.server.admits(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "The Host header names another machine.")
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "A request has no body.")
            return
        path, query = (parts := urlsplit(self.path)).path, parse_qs(parts.query)
        if not self._is_admitted(query):
            self.send_error(HTTPStatus.FORBIDDEN, "The token is missing or wrong.")
        elif path == "/":
            found = self.server.run.changes()
            document = {**found["parts"], "version": found["version"]}
            self._answer("text/html; charset=utf-8", page(document, is_live=True))
        elif path == "/data.json":
            found = self.server.run.changes(query.get("after", [""])[0])
            self._answer("application/json", json.dumps(found, allow_nan=False))
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "There is only / and /data.json.")

    def _is_admitted(self, query: dict[str, list[str]]) -> bool:
        if self.server.token is None:
            return True
        header = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = header or query.get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self._send_body(kind, body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer with a status and one sentence. A method that is not GET is not allowed."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code)
        self.send_response(status)
        if is_method:
            self.send_header("Allow", "GET")
        text = "Only GET is allowed." if is_method else message or status.phrase
        self._send_body("text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))

    def _send_body(self, kind: str, body: bytes) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{policy(is_live=True)}; frame-ancestors 'none'")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged: they contain the token."""
