"""A link that delays frames and loses some: ``python -m tests.support.bad_link PORT PORT SECONDS LOSS``.

Not every kernel has ``netem``. This passes frames between two network interfaces of a namespace.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time
from itertools import count

_ALL, _OUTGOING = 3, 4
_SOL_PACKET, _VNET_HDR = 263, 15
_LARGEST = 1 << 17


def opened(interface: str) -> socket.socket:
    """Open an interface for whole frames."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    # With the header that says which checksums and segments the kernel has left to a device.
    link.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    link.bind((interface, 0))
    return link


def main(first: str, second: str, delay: str, loss: str) -> None:
    ends = [opened(first), opened(second)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    rng, order = random.Random(0), count()
    due: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        wait = None if not due else max(0.0, due[0][0] - time.monotonic())
        for end in select.select(ends, [], [], wait)[0]:
            frame, address = end.recvfrom(_LARGEST)
            if address[2] != _OUTGOING and rng.random() >= float(loss):
                heapq.heappush(due, (time.monotonic() + float(delay), next(order), other[end], frame))
        while due and due[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(due)
            try:
                end.send(frame)
            except OSError:  # the interface is down, or its queue is full: the frame is lost
                continue


if __name__ == "__main__":
    main(*sys.argv[1:])
