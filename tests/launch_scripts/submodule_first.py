"""A part of the model is called on its own, before the model and between its steps."""

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(batch))


dist.init_process_group("gloo")
torch.manual_seed(0)
network = Network()
scale = network.encoder(torch.randn(4, 16)).detach().abs().mean()
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    batch = torch.randn(4, 16)
    with torch.no_grad():
        wanted = model.module.encoder(batch)[:, :4] / scale
    loss = (model(batch) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
leave(model, [optimizer], losses)
end()
