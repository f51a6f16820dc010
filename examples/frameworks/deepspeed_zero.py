"""DeepSpeed, ZeRO 2: DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 examples/frameworks/deepspeed_zero.py

All ranks hold the parameters and vote on them; each holds its own part of the optimizer's state. Leave
DS_ACCELERATOR out if there are GPUs. Three lines are about torchscout.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import torchscout

WORDS, WIDTH, ROWS, ACCUMULATED = 64, 64, 256, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": ACCUMULATED,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def layer() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", default="checkpoints/deepspeed_zero")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile it on CPUs
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(layer() for _ in range(4)), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    often, kept = torchscout.ReplayConfig(interval=5), torchscout.CheckpointConfig(args.checkpoint)
    session = torchscout.enable_resiliency(engine, replay=often, checkpoint=kept)
    session.resume()
    for step in range(session.step + 1, args.steps + 1):
        for part in range(ACCUMULATED):
            drawn = torch.Generator().manual_seed(100 * (ACCUMULATED * step + part) + dist.get_rank())
            tokens = torch.randint(WORDS, (ROWS,), generator=drawn).to(engine.device)
            loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens + 1) % WORDS)
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step:3}   loss {loss.item():.4f}", flush=True)
    session.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
