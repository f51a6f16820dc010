"""Programs that model language: nanoGPT's loop in several forms, LoRA, reinforcement learning, an LSTM."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.float8 import in_float8, scaling_of
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LENGTH, REPLICATED, Block, next_token_loss, text

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
    """Products in float8 with delayed scaling, whose state is in buffers and in objects."""
    model = in_float8(GPT())
    _nanogpt(job, DistributedDataParallel(model), state=scaling_of(model))


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
    job: Job,
    model: nn.Module,
    *,
    around: Context = nullcontext,
    scaled: bool = False,
    parts: int = 1,
    state: Any = None,
    lengths: tuple[int, ...] = (LENGTH,),
) -> None:
    """Warmup and cosine decay, clipped gradients, decay for matrices only.

    ``state`` is what the model has besides parameters and buffers.
    """
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
    states = {"scaler": scaler, **({} if state is None else {"own": state})}
    job.attach(model, optimizer, states=states, also=lambda: [each.state_dict() for each in states.values()])
    for step in job.steps():
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        for part in range(parts):
            length = lengths[(step + job.rank) % len(lengths)]
            tokens, targets = (each[:, :length] for each in text(step, job.rank, part))
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


class Unusual(Block):
    """Is called by name, also with what is no tensor, and returns a tree; changes its input; draws numbers
    from generators of Python, NumPy and its own; counts calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.calls = torch.Generator(device="cpu").manual_seed(5), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(  # type: ignore[override]
        self, *, hidden: torch.Tensor, mask: torch.Tensor | None, scale: int, how: Any
    ) -> dict[str, Any]:
        self.calls += 1
        self.seen += 1
        noise = torch.rand(hidden.shape, generator=self.own, device="cpu").to(hidden.device)
        hidden.add_(noise * (random.random() + np.random.rand()))
        x = how(super().forward(hidden)) * scale
        return {"hidden": x, "extra": (None, x.mean().detach(), x.sum()), "kind": "tree", "mask": mask}


class UnusualGPT(GPT):
    """Its embedding and its head share their weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Unusual(), Unusual()])
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            out = block(hidden=x, mask=None, scale=2, how=torch.tanh)
            x = out["hidden"] + 0.01 * out["extra"][2]
        return self.head(self.norm(x))

    def own_state(self) -> OwnState:
        return OwnState([each for each in self.blocks if isinstance(each, Unusual)])


class OwnState:
    """Generators and counters of layers, and the generators of Python and NumPy."""

    def __init__(self, blocks: list[Unusual]) -> None:
        self._blocks = blocks

    def state_dict(self) -> dict[str, Any]:
        return {
            "own": [each.own.get_state() for each in self._blocks],
            "calls": [each.calls for each in self._blocks],
            "python": repr(random.getstate()),
            "numpy": np.random.get_state()[1].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What Python and NumPy draw is part of every checkpoint."""
        for block, own, calls in zip(self._blocks, state["own"], state["calls"], strict=True):
            block.own.set_state(own)
            block.calls = calls


def unusual_layers(job: Job) -> None:
    """The length of sequences differs from rank to rank and from step to step."""
    random.seed(2)
    np.random.seed(3)
    net = UnusualGPT()
    _nanogpt(job, DistributedDataParallel(net), state=net.own_state(), lengths=(3, 4, 5, 6))


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
_ON_CUDA = ("healthy", "slow_then_flipped")
WRONG = {
    "output": Wrong("blocks.1/output", 2),
    "gradient": Wrong("blocks.1/grad_input", 2),
    "weight": Wrong("blocks.0.up/weight", 2, calls=range(1)),
    "average": Wrong("blocks.0.up/weight.exp_avg_sq", 0, calls=range(1)),
}
_OUTPUT = {"output": WRONG["output"]}

JOBS: dict[str, Entry] = {
    "nanogpt": Entry(
        fp32,
        compared=REPLICATED,
        unchecked=(),
        wrong=WRONG,
        in_test=("healthy", "slow_then_flipped", "late", "killed", "diverging", "closed", "resumed"),
        in_ci=("wrong_number:gradient", "wrong_number:average"),
        on_cuda=_ON_CUDA,
    ),
    "nanogpt-bf16": Entry(bf16, compared=REPLICATED, unchecked=(), patience=3, on_cuda=_ON_CUDA),
    "nanogpt-fp16": Entry(fp16, compared=REPLICATED, unchecked=(), patience=4, on_cuda=_ON_CUDA),
    "nanogpt-compiled": Entry(
        compiled, compared=REPLICATED, unchecked=(), patience=3, not_slowed=_NO_HOOK, on_cuda=_ON_CUDA
    ),
    "nanogpt-float8": Entry(
        float8,
        compared=REPLICATED,
        unchecked=(),
        wrong={"output": Wrong("blocks.1.up/output", 2, surface="blocks.1/output")},
        in_ci=("healthy", "wrong_number:output"),
        on_cuda=(*_ON_CUDA, "wrong_number:output", "late", "resumed"),
    ),
    "nanogpt-accumulation": Entry(accumulation, compared=REPLICATED, unchecked=(), on_cuda=_ON_CUDA),
    "activation-offload": Entry(activation_offload, compared=REPLICATED, unchecked=(), on_cuda=_ON_CUDA),
    "checkpointing": Entry(checkpointing, compared=REPLICATED, unchecked=(), on_cuda=_ON_CUDA),
    "checkpointing-reentrant": Entry(
        checkpointing_reentrant,
        not_slowed="layers that use_reentrant=True recomputes are not replayed",
        unchecked=("blocks.*",),
        on_cuda=_ON_CUDA,
    ),
    "custom-function": Entry(custom_function, unchecked=(), wrong=_OUTPUT, on_cuda=_ON_CUDA),
    "lora": Entry(lora, unchecked=(), on_cuda=_ON_CUDA),
    "reinforcement": Entry(reinforcement, compared=REPLICATED, unchecked=()),
    "lstm": Entry(lstm, on_cuda=("healthy",)),
    "unusual-layers": Entry(unusual_layers, unchecked=(), wrong=_OUTPUT, in_test=("healthy",)),
}
