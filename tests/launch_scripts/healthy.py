"""DDP over many small steps, with a pause now and then; arguments: a folder and the number of steps."""

import sys
import time

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(int(sys.argv[2])):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 250:  # as an evaluation or a checkpoint makes
            time.sleep(1.0)
    leave(model, [optimizer])
    end()


if __name__ == "__main__":
    main()
