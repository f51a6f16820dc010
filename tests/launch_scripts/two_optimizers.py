"""One model with two optimizers; the one that is made first steps last."""

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
biases = torch.optim.SGD([each for each in model.parameters() if each.ndim == 1], lr=1e-2, momentum=0.9)
matrices = torch.optim.AdamW([each for each in model.parameters() if each.ndim == 2], lr=1e-2)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    matrices.step()
    biases.step()
    model.zero_grad()
    losses.append(loss.item())
leave(model, [matrices, biases], losses)
end()
