"""A model of the Hugging Face form: torchrun --nproc-per-node 3 examples/huggingface.py

It has a config, takes input_ids and labels, and returns loss and logits. With --gradient-checkpointing its
layers are recomputed in the backward pass.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchscout
from causal_lm import CausalLM, Config
from common import arguments, batch, own_device, say, what_was_seen


def main() -> None:
    args = arguments("huggingface")
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    causal_lm = CausalLM(Config())
    if args.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable()
    model = DistributedDataParallel(causal_lm.to(device))
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
        input_ids, _ = batch(step, dist.get_rank(), device)
        outputs = model(input_ids=input_ids, labels=input_ids)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        say(f"step {step:3}   loss {outputs.loss.item():.4f}")

    say(what_was_seen(session))
    session.close()
    del model  # Gloo may hang at the end while a DistributedDataParallel exists
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
