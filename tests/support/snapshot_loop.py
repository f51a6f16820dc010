"""A trainer to be killed: captures after every update, says which snapshots are sealed, goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from tests.support.states import identity
from torchscout.checkpoint.generation import Role
from torchscout.checkpoint.snapshot import Snapshots
from torchscout.checkpoint.state import collect


def main(folder: Path, first: int, count: int, width: int) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    snapshots = Snapshots(folder, 0)
    optimizer.register_step_pre_hook(lambda *_: snapshots.fence())
    previous = None
    print("ready", snapshots.sealed[-1].step if snapshots.sealed else 0, flush=True)
    for step in range(first, first + count):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():  # of one value, by which a torn copy would be known
            for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]:
                tensor.fill_(float(step))
        if previous is not None and previous.wait(60):
            print("sealed", previous.identity.generation.step, flush=True)
        elif previous is not None:
            print("problem", previous.problem, flush=True)
        previous = snapshots.capture(identity(step), Role.LATEST, collect(model, [optimizer], {}))
    assert previous is not None
    print(*(("sealed", step) if previous.wait(60) else ("problem", previous.problem)), flush=True)
    snapshots.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
