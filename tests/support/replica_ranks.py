"""Ranks that copy their state to each other: processes with folders of their own, as if on other machines.

A rank runs one command at a time from its standard input, and prints the result. It does not
import torch. A ``Wire`` stands between two of them and can hold up or damage what passes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.streams import PIECE, Secret
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, encode
from torchscout.checkpoint.storage.shards import path_of, write
from torchscout.utils.aes_gcm import TAG_BYTES, AesGcm
from torchscout.utils.listener import MAGIC

PATIENCE = 1.0
_PROGRAM = """
import json, sys
from pathlib import Path
from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication.replicator import Replicator

rank, memory, token, port, patience = sys.argv[1:]
replicator = Replicator(int(rank), Path(memory), token, listens=("127.0.0.1", int(port)),
                        timeout_seconds=float(patience))
assert "torch" not in sys.modules
print(json.dumps([replicator.address, replicator.pid]), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "connect":
        answer = replicator.connect([tuple(each) for each in arguments[0]], arguments[1])
    elif name == "send":
        answer = replicator.send(Path(arguments[0]))
    elif name == "retire":
        answer = replicator.retire(Generation(*each) for each in arguments[0])
    elif name == "rate":
        answer = replicator.rate
    elif name == "held":
        answer = sorted(replicator.held())
    else:
        answer = getattr(replicator, name)(*arguments)
    print(json.dumps(answer), flush=True)
"""


def identity(rank: int, step: int, world_size: int = 2) -> ShardIdentity:
    return ShardIdentity(
        job="job", mesh="replica=2", world_size=world_size, rank=rank, generation=Generation(step)
    )


def seal(
    memory: Path, rank: int, step: int, size: int = 10_000, world_size: int = 2, first: bytes | None = None
) -> Path:
    """Seal a shard in a memory; tensor ``a`` has the bytes ``first``, or random ones like ``b``."""
    name = identity(rank, step, world_size)
    path = path_of(memory, name, rank)
    blobs = [Blob("a", "uint8", (size,), first or os.urandom(size)), Blob("b", "int32", (3,), os.urandom(12))]
    write(path, encode(name, TrustLevel.LATEST, None, blobs))
    return path


def files(memory: Path) -> list[str]:
    """Return the names of all files in a folder, from which folders may be removed meanwhile, except for
    the spare files of retired copies."""
    names = (name for _, _, names in os.walk(memory) for name in names)
    return sorted(name for name in names if not name.startswith(".spare."))


def offer(transfer: str, size: Any, rank: int = 0, step: int = 1, **changes: Any) -> bytes:
    """The message that announces a shard."""
    fields = {"identity": identity(rank, step).to_json(), "size": size, **changes}
    return wire.encode("offer", transfer=transfer, **fields)


def sealed_pieces(secret: Secret, data: bytes, number: int = 0) -> bytes:
    """What a stream sends after its ticket."""
    cipher, sent = AesGcm(secret.key, encrypts=True), bytearray()
    for start in range(0, len(data), PIECE):
        plain = bytearray(data[start : start + PIECE])
        sealed = bytearray(len(plain) + TAG_BYTES)
        cipher.encrypt(number + start // PIECE, plain, sealed)
        sent += sealed
    return bytes(sent)


def stream(address: tuple[str, int], ready: dict[str, Any], data: bytes) -> socket.socket:
    """Send these bytes as the transfer for which the holder is ready; the caller closes the connection."""
    secret = Secret.from_json(ready["secret"])
    connection = socket.create_connection(address)
    connection.sendall(MAGIC + secret.ticket + sealed_pieces(secret, data))
    return connection


class Rank:
    """One process with its own memory."""

    def __init__(
        self, rank: int, memory: Path, token: str, port: int = 0, patience: float = PATIENCE
    ) -> None:
        self.rank, self.memory = rank, memory
        command = [sys.executable, "-c", _PROGRAM, str(rank), str(memory), token, str(port), str(patience)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        (host, number), self.copying = self._answer()
        self.address = (host, number)

    def ask(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def held(self) -> list[int]:
        """Return the steps of the copies that the rank holds."""
        return [step for step, _ in self.ask("held")]

    def signal(self, number: signal.Signals) -> None:
        """To the rank and to the process that makes its copies."""
        for pid in (self.process.pid, self.copying):
            os.kill(pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.copying, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 20)
        assert ready, f"rank {self.rank} is held up"
        return json.loads(self.process.stdout.readline())


@contextmanager
def ranks(folder: Path, token: str, hosts: Sequence[str], patience: float = PATIENCE) -> Iterator[list[Rank]]:
    """Start one connected rank for each host; ranks of one host share a memory."""
    with ExitStack() as ends:
        started = []
        for rank, host in enumerate(hosts):
            started.append(Rank(rank, folder / host, token, patience=patience))
            ends.callback(started[-1].end)
        for each in started:
            each.ask("connect", [other.address for other in started], list(hosts))
        yield started


class Wire:
    """A relay of everything between whoever connects to ``address`` and ``target``."""

    def __init__(self, target: tuple[str, int], hold_after: int = 1 << 60, flip_at: int = 1 << 60) -> None:
        self._target, self._hold_after, self._flip_at = target, hold_after, flip_at
        self.held_up = threading.Event()
        self.released = threading.Event()
        self.flipped = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._relay, args=ends, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if forth and passed > self._hold_after and not self.released.is_set():
                    self.held_up.set()
                    self.released.wait()
                if forth and passed > self._flip_at and not self.flipped:
                    self.flipped = True
                    data = data[:-1] + bytes([data[-1] ^ 4])
                sink.sendall(data)
                passed += len(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
