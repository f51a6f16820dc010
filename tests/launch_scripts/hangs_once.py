"""DDP; in the lives that the second argument names, rank 1 sleeps for ever before step 4."""

import os
import time
from pathlib import Path
from sys import argv

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 9):
    if (step, dist.get_rank()) == (4, 1) and life in argv[2]:
        Path(argv[1], f"hung-{life}").touch()
        time.sleep(600)
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
leave(model, [optimizer])
end()
