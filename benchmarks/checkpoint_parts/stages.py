"""What each stage of a copy costs, without pacing and without other stages: GB/s that one core could do.

In processor time of the thread that does it, so that other work on the machine matters less. ``sending`` and
``receiving`` are the sums; ``read`` is what ``map`` replaces. ``memcpy`` is the yardstick.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from checkpoint_parts.job import Figures, identity, in_memory
from torchscout.checkpoint.replication.streams import PIECE, mapped_part
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.checkpoint.storage.spare_file import SpareFile
from torchscout.errors import DamagedError
from torchscout.utils.aes_gcm import KEY_BYTES, TAG_BYTES, AesGcm

ROUNDS = 3


def stages(megabytes: int) -> Figures:
    pieces = max(8, (megabytes << 20) // PIECE)
    with in_memory() as folder:
        rounds = [_one_round(folder, pieces) for _ in range(ROUNDS)]
    best = {name: min(row[name] for row in rounds) / (pieces * PIECE) * 1e9 for name in rounds[0]}
    moved = best["receive"] + best["decrypt"] + best["digest"]
    sums = {
        "sending": best["map"] + best["encrypt"] + best["send"],
        "receiving": best["map spare"] + moved,
        "receiving, no spare": best["allocate"] + moved,
    }
    copied = best["memcpy"]
    return {
        name: {
            "s_per_gb": round(seconds, 3),
            "gb_s_per_core": round(1 / seconds, 2),
            "to_memcpy": round(seconds / copied, 2),
        }
        for name, seconds in {**best, **sums}.items()
    }


def _one_round(folder: Path, pieces: int) -> dict[str, float]:
    """Seconds of processor time for all pieces, by stage."""
    size, path = pieces * PIECE, folder / "state"
    piece, sealed = memoryview(bytearray(os.urandom(PIECE))), memoryview(bytearray(PIECE + TAG_BYTES))
    writer, reader = (AesGcm(bytes(KEY_BYTES), encrypts=encrypts) for encrypts in (True, False))
    source, target = bytearray(size), memoryview(bytearray(size))
    path.write_bytes(source)

    def each(work: Callable[[int], object]) -> float:
        start = time.thread_time()
        for number in range(pieces):
            work(number)
        return time.thread_time() - start

    with path.open("rb") as file:
        found = {
            "memcpy": each(lambda n: target.__setitem__(_at(n), memoryview(source)[_at(n)])),
            "read": each(lambda n: os.preadv(file.fileno(), [piece], n * PIECE)),
            "map": each(lambda n: mapped_part(file.fileno(), n * PIECE, PIECE).close()),
            "encrypt": each(lambda n: writer.encrypt(n, piece, sealed)),
        }
    found["send"], found["receive"] = _loopback(piece, pieces)
    for name, spare in (("allocate", None), ("map spare", SpareFile(path, folder))):
        shard = IncomingShard(folder, identity(1), 1, size, spare)
        found[name] = each(lambda _, shard=shard: shard.room(PIECE))
        shard.discard()
    found["decrypt"] = each(lambda n: _decrypt(reader, n, sealed))
    digest = xxhash.xxh3_128()
    found["digest"] = each(lambda _: digest.update(piece))
    return found


def _at(number: int) -> slice:
    return slice(number * PIECE, (number + 1) * PIECE)


def _decrypt(reader: AesGcm, number: int, sealed: memoryview) -> None:
    with suppress(DamagedError):  # which is known after the same work
        reader.decrypt(number, sealed[:PIECE], sealed[PIECE:])


def _loopback(piece: memoryview, pieces: int) -> tuple[float, float]:
    """Processor time of sending and of receiving over TCP, nothing else."""
    room, received = memoryview(bytearray(len(piece))), []

    def receive(server: socket.socket) -> None:
        connection, _ = server.accept()
        start = time.thread_time()
        with connection:
            while connection.recv_into(room, 0, socket.MSG_WAITALL):
                pass
        received.append(time.thread_time() - start)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=receive, args=(server,))
        thread.start()
        with socket.create_connection(server.getsockname()) as connection:
            start = time.thread_time()
            for _ in range(pieces):
                connection.sendall(piece)
            sent = time.thread_time() - start
        thread.join()
    return sent, received[0]
