"""Evaluation only: no optimizer, and metrics that are reduced among the ranks."""

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).eval()
errors = []
with torch.inference_mode():
    for step in range(20):
        torch.manual_seed(100 * step + dist.get_rank())
        error = model(torch.randn(4, 16)).square().mean()
        dist.all_reduce(error)
        errors.append(error.item())
leave(model, losses=errors)
end()
