"""Two models with an optimizer each: which one to attach to cannot be told."""

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
generator, critic = (
    DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))) for _ in range(2)
)
optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (critic, generator)]
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    for optimizer in optimizers:
        loss = critic(generator(torch.randn(4, 16))).square().mean()
        loss.backward()
        optimizer.step()
        generator.zero_grad()
        critic.zero_grad()
        losses.append(loss.item())
leave(nn.ModuleList([generator, critic]), optimizers, losses)
end()
