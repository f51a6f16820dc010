"""Distillation: a teacher without gradients beside the student."""

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


dist.init_process_group("gloo")
torch.manual_seed(0)
teacher = network().eval().requires_grad_(False)
student = DistributedDataParallel(network())
optimizer = torch.optim.SGD(student.parameters(), lr=1e-2, momentum=0.9)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    batch = torch.randn(4, 16)
    with torch.no_grad():
        wanted = teacher(batch)
    loss = (student(batch) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
leave(student, [optimizer], losses)
end()
