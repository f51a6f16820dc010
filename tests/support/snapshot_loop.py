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
from torchscout.checkpoint.snapshot.snapshots import Snapshots
from torchscout.checkpoint.state.training_state import StateParts, collect


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
    snapshots = Snapshots(folder, 0)
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    previous = None
    say("ready", snapshots.sealed[-1].step if snapshots.sealed else 0)
    for step in range(first, first + count):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():  # of one value, by which a torn copy would be known
            for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]:
                tensor.fill_(float(step))
        if previous is not None and previous.wait(60):
            say("sealed", previous.identity.generation.step)
        elif previous is not None:
            say("problem", previous.problem)
        previous = snapshots.capture(
            identity(step), TrustLevel.LATEST, collect(StateParts(model, [optimizer], {}))
        )
    assert previous is not None
    say(*(("sealed", step) if previous.wait(60) else ("problem", previous.problem)))
    snapshots.close()
    say("done")


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
