"""Hybrid sharding (HSDP): torchrun --nproc-per-node 4 examples/hsdp.py

Every two ranks shard one copy, and ranks with the same shard vote on it. With two copies this shows which
shard is wrong, but not on which rank. So all four ranks vote on layers, after gathering their parameters.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchscout
from common import Transformer, arguments, batch, loss_of, own_device, say, what_was_seen

SHARDS = 2


def main() -> None:
    args = arguments("hsdp")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    shape = (dist.get_world_size() // SHARDS, SHARDS)
    axes = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=axes)
    fully_shard(model, mesh=axes)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
