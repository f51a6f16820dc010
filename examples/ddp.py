"""Data parallelism: torchrun --nproc-per-node 3 examples/ddp.py

All ranks do the same work and vote. Three or more name a rank; two only show that they differ.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchscout
from common import Transformer, arguments, batch, loss_of, own_device, say, what_was_seen


def main() -> None:
    args = arguments("ddp")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = torchscout.enable_resiliency(
        model,
        optimizer,
        replay=torchscout.ReplayConfig(interval=5),  # the default is 20 steps
        observer=torchscout.ObserverConfig(),
        checkpoint=torchscout.CheckpointConfig(args.checkpoint),
    )
    say(session.resume().reason)

    for step in range(session.step + 1, args.steps + 1):
        tokens, targets = batch(step, dist.get_rank(), device)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step:3}   loss {loss.item():.4f}")

    say(what_was_seen(session))
    session.close()
    del model  # Gloo may hang at the end while a DistributedDataParallel exists
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
