"""The other machine of ``replicate``: a process that takes copies, and plain bytes over TCP beside them.

``python holder.py MEMORY TOKEN`` prints where it listens; it ends with its standard input. It does not import
torch: a holder's work is done by a process beside the trainer, whose id is printed too.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

from torchscout.checkpoint.replication.replicator import Replicator

PIECE = 4 << 20


def main(memory: Path, token: str) -> None:
    replicator = Replicator(1, memory, token)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_take_plain_bytes, args=(listener, memory / "plain"), daemon=True).start()
    print(json.dumps([replicator.address, listener.getsockname(), replicator.pid]), flush=True)
    replicator.connect([tuple(each) for each in json.loads(sys.stdin.readline())], ["a", "b"])
    sys.stdin.read()
    replicator.close()


def _take_plain_bytes(listener: socket.socket, path: Path) -> None:
    """A file for each connection: its length in eight bytes, then its bytes; one byte says that all came."""
    room = memoryview(bytearray(PIECE))
    while True:
        connection, _ = listener.accept()
        with connection, path.open("wb", buffering=0) as file:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            while left and (count := connection.recv_into(room)):
                file.write(room[:count])
                left -= count
            connection.sendall(b"!")
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
