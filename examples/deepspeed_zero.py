"""DeepSpeed, ZeRO 2: DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 examples/deepspeed_zero.py

All ranks hold the parameters, and vote on them; of the optimizer's state each has a part of its own.
Where there are CUDA devices, leave DS_ACCELERATOR out.
"""

import deepspeed
import torch
import torch.distributed as dist

import torchscout
from common import Transformer, arguments, batch, loss_of, own_device, say, what_was_seen

ACCUMULATED = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": ACCUMULATED,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    args = arguments("deepspeed_zero")
    device = own_device()
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    session = torchscout.enable_resiliency(
        engine,
        replay=torchscout.ReplayConfig(interval=5),  # a long job does with the default, 20 steps
        checkpoint=torchscout.CheckpointConfig(args.checkpoint),
    )
    say(session.resume().reason)

    for step in range(session.step + 1, args.steps + 1):
        for part in range(ACCUMULATED):
            tokens, targets = batch(ACCUMULATED * step + part, dist.get_rank(), device)
            loss = loss_of(engine(tokens).float(), targets)
            engine.backward(loss)
            engine.step()
        say(f"step {step:3}   loss {loss.item():.4f}")

    say(what_was_seen(session))
    session.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
