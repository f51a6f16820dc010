"""A trainer to be killed: it captures after every update and prints which snapshots are sealed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.support.states import identity
from torchscout.checkpoint.gate import TrustLevel
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.state.collect import StateParts, collect


def say(*words: object, log: Path | None = None) -> None:
    line = " ".join(map(str, words)) + "\n"
    if log is None:
        sys.stdout.write(line)
        sys.stdout.flush()
    else:
        with log.open("a") as file:
            file.write(line)


def life(folder: Path, first: int, log: Path) -> None:
    """Train until killed."""
    train(folder, first, 1_000_000, 512, partial(say, log=log))


def train(folder: Path, first: int, count: int, width: int, say: Callable[..., None] = say) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    shards.clean(folder)
    snapshots = Snapshots(folder, 0)
    snapshots.prepare(2 * sum(each.nbytes for each in model.parameters()))
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    say("ready", snapshots.sealed[-1].step if snapshots.sealed else 0)
    step = first
    while step < first + count:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():  # of one value, by which a torn copy would be known
            for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]:
                tensor.fill_(float(step))
        snapshots.wait_until_ready(60)
        state = collect(StateParts(model, [optimizer], {}))
        capture = snapshots.capture(identity(step), TrustLevel.LATEST, state)
        optimizer.step()
        if capture.wait(60):
            say("sealed", step)
        elif "was not copied within" in str(capture.problem):  # the machine is busy
            continue
        else:
            say("problem", capture.problem)
        step += 1
    snapshots.close()
    say("done")


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
