"""Programs that model language: nanoGPT's loop in several forms, LoRA, reinforcement learning, an LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LENGTH, next_token_loss, text
from tests.support.fp8_layers import Float8Linear

Context = Callable[[], AbstractContextManager[object]]


def fp32(job: Job) -> None:
    _nanogpt(job, DistributedDataParallel(GPT()))


def bf16(job: Job) -> None:
    _nanogpt(job, DistributedDataParallel(GPT()), around=lambda: torch.autocast(job.device, torch.bfloat16))


def fp16(job: Job) -> None:
    _nanogpt(
        job,
        DistributedDataParallel(GPT()),
        around=lambda: torch.autocast(job.device, torch.float16),
        scaled=True,
    )


def compiled(job: Job) -> None:
    """As nanoGPT does it: compiled first, then wrapped."""
    _nanogpt(
        job,
        DistributedDataParallel(
            torch.compile(GPT(), backend="aot_eager" if job.device == "cpu" else "inductor")
        ),
    )


def float8(job: Job) -> None:
    """Products in float8 with delayed scaling, whose state is in buffers."""
    model = GPT()
    for block in model.blocks:
        block.up = Float8Linear(block.up.in_features, block.up.out_features, is_held=False)
        block.down = Float8Linear(block.down.in_features, block.down.out_features, is_held=False)
    _nanogpt(job, DistributedDataParallel(model))


def accumulation(job: Job) -> None:
    """Three backward passes for each update; only the last one reduces."""
    _nanogpt(job, DistributedDataParallel(GPT()), parts=3)


def activation_offload(job: Job) -> None:
    """What backward needs is kept in another memory meanwhile."""
    _nanogpt(job, DistributedDataParallel(GPT()), around=torch.autograd.graph.save_on_cpu)


def checkpointing(job: Job) -> None:
    _nanogpt(job, DistributedDataParallel(Recomputing(reentrant=False)))


def checkpointing_reentrant(job: Job) -> None:
    _nanogpt(job, DistributedDataParallel(Recomputing(reentrant=True)))


def custom_function(job: Job) -> None:
    net = GPT()
    for block in net.blocks:
        block.up = nn.Sequential(block.up, Squared())
    _nanogpt(job, DistributedDataParallel(net))


def lora(job: Job) -> None:
    """All weights are frozen but for small matrices beside them."""
    net = GPT().requires_grad_(False)
    for block in net.blocks:
        block.attention.qkv = LowRank(block.attention.qkv)
        block.attention.proj = LowRank(block.attention.proj)
    _nanogpt(job, DistributedDataParallel(net))


def _nanogpt(
    job: Job, model: nn.Module, *, around: Context = nullcontext, scaled: bool = False, parts: int = 1
) -> None:
    """Warmup and cosine decay, clipped gradients, decay for matrices only."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in trained if each.ndim >= 2], "weight_decay": 0.1},
            {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    scaler = torch.amp.GradScaler(job.device, enabled=scaled)
    job.attach(model, optimizer, states={"scaler": scaler}, also=lambda: [scaler.state_dict()])
    for step in job.steps():
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        for part in range(parts):
            tokens, targets = text(step, job.rank, part)
            with nullcontext() if part == parts - 1 else model.no_sync():
                with around():
                    loss = next_token_loss(model(tokens), targets) / parts
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def _rate(step: int, warmup: int = 5, decay: int = 600) -> float:
    if step < warmup:
        return 1e-3 * step / warmup
    return 1e-4 + 0.45e-3 * (1.0 + math.cos(math.pi * min(1.0, step / decay)))


class Recomputing(GPT):
    """Activations of the blocks are computed once more in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (positive,) = ctx.saved_tensors
        return 2 * grad * positive


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SquaredReLU.apply(x)


class LowRank(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.a), self.b)


def reinforcement(job: Job) -> None:
    """Text is generated without gradients, rewarded, and the policy is updated on what it wrote."""
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    for step in job.steps():
        prompt, _ = text(step, job.rank)
        model.eval()
        written = _generate(model.module, prompt[:, :4], LENGTH - 4 + job.rank)  # ends at another length
        model.train()
        reward = (written[:, 4:] % 2 == 0).float().mean(1)
        advantage = reward - reward.mean()
        chosen = model(written[:, -LENGTH:-1]).log_softmax(-1).gather(-1, written[:, -LENGTH + 1 :, None])
        optimizer.zero_grad()
        (-(advantage[:, None] * chosen[..., 0]).mean()).backward()
        optimizer.step()


@torch.no_grad()
def _generate(net: nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        logits = net(tokens[:, -LENGTH:])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(48, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(24, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def lstm(job: Job) -> None:
    _nanogpt(job, DistributedDataParallel(Recurrent()))


_NO_HOOK = "not tried: compiled code cannot hold the hook"
JOBS: dict[str, Entry] = {
    "nanogpt": Entry(
        fp32,
        in_test=("healthy", "slow_then_flipped", "late", "killed", "diverging", "closed", "resumed"),
    ),
    "nanogpt-bf16": Entry(bf16, patience=3),
    "nanogpt-fp16": Entry(fp16, patience=4),
    "nanogpt-compiled": Entry(compiled, patience=3, not_slowed=_NO_HOOK),
    "nanogpt-float8": Entry(float8),
    "nanogpt-accumulation": Entry(accumulation),
    "activation-offload": Entry(activation_offload),
    "checkpointing": Entry(checkpointing),
    "checkpointing-reentrant": Entry(
        checkpointing_reentrant,
        not_slowed="layers that use_reentrant=True recomputes are not replayed",
    ),
    "custom-function": Entry(custom_function),
    "lora": Entry(lora),
    "reinforcement": Entry(reinforcement),
    "lstm": Entry(lstm),
}
