"""A local HTTP server that keeps what is posted to it, and answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Received:
    """The requests so far."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.paths: list[str] = []
        self.types: list[str | None] = []
        self.bodies: list[bytes] = []


Answer = Callable[[int], int | tuple[int, str]]
"""Takes the number of the request, from 1, and returns the status; with a redirect, also its target."""


@contextmanager
def http_server(answer: Answer = lambda _: 200) -> Iterator[Received]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.types.append(self.headers["Content-Type"])
            received.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            received.paths.append(self.path)
            answered = answer(len(received.paths))
            status, target = answered if isinstance(answered, tuple) else (answered, None)
            self.send_response(status)
            if target is not None:
                self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            received.paths.append(f"GET {self.path}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
