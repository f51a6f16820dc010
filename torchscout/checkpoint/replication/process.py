"""The process beside a trainer that copies shards: started by ``Replicator``.

Encryption and digests take most of a core while a copy is made. In the trainer they would wait for the GIL,
and training for them. The process also owns the listening socket, so that the network cannot reach a trainer.
It stays in the trainer's session: Linux may share cores equally among sessions (autogroups), and the low
priority of the threads that move bytes counts only within one.

Commands come as lines of JSON on standard input, of which the first has the job's token; events go as lines
of JSON to standard output. It ends with its standard input or with its trainer. It does not import torch.

    commands   connect holder address owners; send number path; limit rate; retire generations
    events     port, or error and kind; over number copied; state held arriving totals; problem
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication.engine import ReplicationEngine
from torchscout.errors import ScoutError

__all__ = ["main"]


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setpgid(0, 0)  # a signal to the trainer's group is not for this process
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # see ``spare_file``: another process asks for a leased file
    with open(0, "rb", buffering=0, closefd=False) as commands:
        setup = json.loads(commands.readline())
    host, port = setup["listens"]
    try:
        engine = ReplicationEngine(
            setup["rank"], Path(setup["memory"]), setup["token"], (host, port), setup["timeout"]
        )
    except (ScoutError, ValueError) as error:
        _say(error=str(error), mistake=isinstance(error, ValueError))
        return
    _say(port=engine.port)
    try:
        _serve(engine, os.pidfd_open(setup["parent"]))
    except ProcessLookupError:
        return  # the trainer has ended
    finally:
        engine.close()


def _serve(engine: ReplicationEngine, trainer: int) -> None:
    """A child that the trainer forked may keep standard input open, so the trainer itself is watched too."""
    said: dict[str, Any] = {}
    pending = b""
    os.set_blocking(0, False)
    while True:
        engine.wait(0, trainer)
        if select.select([trainer], [], [], 0)[0]:
            return
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            pass
        else:
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _obey(engine, json.loads(line))
        engine.turn()
        for problem in engine.problems:
            _say(problem=problem)
        engine.problems.clear()
        state = {
            "held": sorted(map(list, engine.held)),
            "arriving": [each.to_json() for each in engine.arriving],
            "totals": [engine.totals.count, engine.totals.seconds, engine.totals.bytes],
        }
        if state != said:
            _say(state=state)
            said = state


def _obey(engine: ReplicationEngine, command: dict[str, Any]) -> None:
    kind = command["kind"]
    if kind == "connect":
        address = command["address"]
        engine.connect(
            command["holder"],
            None if address is None else (address[0], address[1]),
            frozenset(command["owners"]),
        )
    elif kind == "send":
        number = command["number"]
        engine.send(Path(command["path"]), lambda copied: _say(over=number, copied=copied))
    elif kind == "limit":
        engine.limit(command["rate"])
    else:
        engine.retire(frozenset(map(Generation.from_json, command["generations"])))


def _say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
