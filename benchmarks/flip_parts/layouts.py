"""Layouts whose ranks hold state that nobody has a copy of, each with a very small model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu

from flip_parts.job import Work
from torchscout.collectives.call import SCOUT_GROUP

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 24, 16, 2, 4, 8
RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x)
        out: torch.Tensor = self.head(self.final(x))
        return out


def batch(step: int, rank: int, vocabulary: int = VOCABULARY, length: int = LENGTH) -> torch.Tensor:
    """Every rank's own tokens, one more than are fed in."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(vocabulary, (ROWS, length + 1), generator=generator)


def slots(optimizer: torch.optim.Optimizer, name: str) -> list[torch.Tensor]:
    return [each[name] for each in optimizer.state.values() if name in each]


def leave_groups() -> None:
    """Process groups of one job are not those of the next."""
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)


def fsdp2(rank: int, sizes: Sequence[int] = (RANKS,)) -> Work:
    net = Net()
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    for module in [*net.stack, net]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)

    def step(number: int, now: Callable[[str], None]) -> None:
        tokens = batch(number, rank)
        now("before forward")
        loss = cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        now("before backward")
        optimizer.zero_grad()
        loss.backward()
        now("before the update")
        optimizer.step()

    return Work(
        (net, optimizer),
        lambda: {
            "weight": [*net.parameters()],
            "exp_avg": slots(optimizer, "exp_avg"),
            "exp_avg_sq": slots(optimizer, "exp_avg_sq"),
        },
        step,
    )


def hsdp(rank: int) -> Work:
    return fsdp2(rank, (2, 2))


def _zero(rank: int, stage: int) -> Work:
    """bfloat16: what the optimizer updates are float32 masters, parts of which each rank has."""
    deepspeed = _deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        # Norms and biases are small enough to stay gathered under ZeRO 3, as in models of usual size.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    inner = engine.optimizer.optimizer

    def step(number: int, now: Callable[[str], None]) -> None:
        tokens = batch(number, rank)
        now("before forward")
        logits = engine(tokens[:, :-1]).float()
        now("before backward")
        engine.backward(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        now("before the update")
        engine.step()

    def held() -> dict[str, list[torch.Tensor]]:
        every: list[Any] = [*engine.module.parameters()]
        found = {
            "exp_avg": slots(inner, "exp_avg"),
            "exp_avg_sq": slots(inner, "exp_avg_sq"),
        }
        if stage < 3:
            masters = [each for group in inner.param_groups for each in group["params"]]
            return found | {"master": masters, "working copy": every}
        # A gathered parameter is a copy of all ranks' shards. Others are empty between passes.
        gathered = [each for each in every if each.numel()]
        return found | {
            "master": list(engine.optimizer.fp32_partitioned_groups_flat),
            "weight": [each.ds_tensor for each in every],
            "working copy": [each for each in gathered if each.ds_persist],
        }

    def leave() -> None:
        engine.destroy()
        _tidy_up_after_deepspeed()

    return Work((engine,), held, step, leave)


def _deepspeed() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    warnings.filterwarnings("ignore")
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would have to be compiled
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    return deepspeed


_LINEAR = torch.nn.functional.linear


def _tidy_up_after_deepspeed() -> None:
    from deepspeed.utils import groups

    torch.nn.functional.linear = _LINEAR  # ZeRO 3 leaves another one in its place
    groups._release_process_group_references()
    leave_groups()


def zero1(rank: int) -> Work:
    return _zero(rank, 1)


def zero2(rank: int) -> Work:
    return _zero(rank, 2)


def zero3(rank: int) -> Work:
    return _zero(rank, 3)


def megatron(rank: int) -> Work:
    from flip_parts.megatron import distributed_optimizer

    return distributed_optimizer(rank)


LAYOUTS: dict[str, Callable[[int], Work]] = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "megatron": megatron,
}
"""Each of four ranks."""
