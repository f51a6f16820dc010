"""No torch.distributed: each process trains its own model."""

import os

import torch
from digest import leave
from torch import nn

torch.manual_seed(int(os.environ["RANK"]))
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(8):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
leave(model, [optimizer], losses)
