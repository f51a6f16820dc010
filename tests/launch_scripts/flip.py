"""DDP on three ranks; after step 6 one weight of rank 1 changes by itself."""

import torch
import torch.distributed as dist
from digest import end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 13):
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 6 and dist.get_rank() == 1:
        with torch.no_grad():
            model.module[1].weight.view(torch.int32)[0, 3] ^= 1 << 20
end()
