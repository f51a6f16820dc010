"""DDP with dropout, a schedule, and a data loader with worker processes."""

import torch
import torch.distributed as dist
from digest import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    rows = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(TensorDataset(rows), 4, sampler=DistributedSampler(rows), num_workers=2)
    losses = []
    for (batch,) in loader:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    leave(model, [optimizer], losses)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
