"""Pipeline parallelism: torchrun --nproc-per-node 6 examples/pipeline_parallel.py

Every two ranks are the stages of one pipeline. Ranks with the same stage vote.
With six ranks three of them vote and can name one; with four, two vote and only show that they differ.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torchscout
from common import Transformer, arguments, average_gradients, batch, loss_of, own_device, say, what_was_seen

STAGES = 2


def main() -> None:
    args = arguments("pipeline_parallel")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    shape = (dist.get_world_size() // STAGES, STAGES)
    axes = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "pipeline"))
    replica, place = axes.get_local_rank("replica"), axes.get_local_rank("pipeline")
    torch.manual_seed(place)
    model = Transformer(place, STAGES).to(device)
    stage = PipelineStage(model, place, STAGES, device, group=axes.get_group("pipeline"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
        tokens, targets = batch(step, replica, device)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([tokens] if stage.is_first else []), target=targets, losses=losses)
        average_gradients(model, axes.get_group("replica"))
        optimizer.step()
        if losses and replica == 0:  # only the last stage knows the loss
            print(f"step {step:3}   loss {torch.stack(losses).mean().item():.4f}", flush=True)

    say(what_was_seen(session))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
