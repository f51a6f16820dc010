"""Gradient accumulation over three batches, of which the last synchronizes."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for step in range(24):
    torch.manual_seed(100 * step + dist.get_rank())
    is_last = step % 3 == 2
    with nullcontext() if is_last else model.no_sync():
        loss = model(torch.randn(4, 16)).square().mean() / 3
        loss.backward()
    losses.append(loss.item())
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
leave(model, [optimizer], losses)
end()
