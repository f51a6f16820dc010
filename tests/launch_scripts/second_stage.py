"""Trains on one rank, leaves the job, and opens a store for a second stage at the same port."""

import os

import torch

# Imported after ``init_process_group``, as by the first optimizer, it would hold the first store itself.
import torch._dynamo
import torch.distributed as dist
from digest import leave
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
leave(model, [optimizer])
dist.destroy_process_group()
dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
