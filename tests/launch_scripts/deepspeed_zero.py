"""DeepSpeed with ZeRO, whose optimizer updates other tensors than the model's."""

import os
import sys

import torch
import torch.distributed as dist
from digest import end, leave
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
engine, optimizer, *_ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(sys.argv[2])},
    },
)
losses = []
for step in range(8):
    torch.manual_seed(100 * step + dist.get_rank())
    loss = engine(torch.randn(4, 16)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
leave(net, [], losses)
end()
