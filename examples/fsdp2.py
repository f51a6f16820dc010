"""Sharded data parallelism (FSDP2): torchrun --nproc-per-node 3 examples/fsdp2.py

The ranks that share one copy vote on layers, after gathering their parameters, and on updates of shards.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchscout
from common import Transformer, arguments, batch, loss_of, own_device, say, what_was_seen


def main() -> None:
    args = arguments("fsdp2")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    shards = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
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
