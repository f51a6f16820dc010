"""Tensor parallelism: torchrun --nproc-per-node 6 examples/tensor_parallel.py

Every two ranks split each layer between them. Ranks with the same part of it vote.
With six ranks three of them vote and can name one; with four, two vote and only show that they differ.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchscout
from common import Transformer, arguments, average_gradients, batch, loss_of, own_device, say, what_was_seen

SPLIT = 2
COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")


def main() -> None:
    args = arguments("tensor_parallel")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    shape = (dist.get_world_size() // SPLIT, SPLIT)
    axes = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "tensor"))
    torch.manual_seed(0)
    model = Transformer().to(device)
    plan = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
    for layer in model.layers:
        parallelize_module(layer, axes["tensor"], plan)
    # Split and whole parameters cannot be updated in one call, hence foreach=False.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    session = torchscout.enable_resiliency(
        model,
        optimizer,
        replay=torchscout.ReplayConfig(interval=5),  # the default is 20 steps
        observer=torchscout.ObserverConfig(),
        checkpoint=torchscout.CheckpointConfig(args.checkpoint),
        parallelism=axes,  # the model itself does not show the layout
    )
    say(session.resume().reason)

    for step in range(session.step + 1, args.steps + 1):
        tokens, targets = batch(step, axes.get_local_rank("replica"), device)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, axes.get_group("replica"))
        optimizer.step()
        say(f"step {step:3}   loss {loss.item():.4f}")

    say(what_was_seen(session))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
