"""Megatron-Core on GPUs: torchrun --nproc-per-node 8 examples/frameworks/megatron_core.py

Two tensor-parallel ranks are one replica, and replicas vote. Three lines are about torchscout.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import torchscout

LENGTH, VOCABULARY, ROWS = 32, 64, 4
PASS = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": ROWS, "forward_only": False}


def forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches).cuda()  # counting sequences
    mask, places = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool(), torch.arange(LENGTH).expand(ROWS, -1)
    losses = model(tokens[:, :-1].contiguous(), places.cuda(), mask.cuda(), labels=tokens[:, 1:].contiguous())
    return losses, lambda each: (each.float().mean(), {"loss": each.detach().float().mean()})


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tensor_model_parallel_size": 2}
    config = TransformerConfig(**sizes, finalize_model_grads_func=distributed.finalize_model_grads)
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    setup = distributed.DistributedDataParallelConfig()
    chunks = [distributed.DistributedDataParallel(config, setup, model.cuda())]
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, min_lr=3e-3), chunks)
    kept, often = torchscout.CheckpointConfig("checkpoints"), torchscout.ReplayConfig(interval=5)
    session = torchscout.enable_resiliency(chunks, optimizer, replay=often, checkpoint=kept)
    session.resume()
    run = get_forward_backward_func()
    for step in range(session.step + 1, session.step + 6):
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        first = 7 * step + 13 * parallel_state.get_data_parallel_rank() + torch.arange(ROWS)[:, None]
        batches = iter([(first + torch.arange(LENGTH + 1)) % VOCABULARY])
        (seen,) = run(forward_step_func=forward_step, data_iterator=batches, model=chunks[0], **PASS)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:3}   loss {seen['loss'].item():.4f}", flush=True)
    session.close()


if __name__ == "__main__":
    main()
