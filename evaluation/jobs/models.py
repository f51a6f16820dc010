"""Small models and their data; every step's data follows from the step and the rank alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere

from evaluation.jobs.job import Job

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 12, 24, 2
LAYERS = ("tokens", "positions", "blocks.0", "blocks.1", "head")
"""What is replayed of the GPT."""
UPDATES = tuple(
    f"optimizer/{what}"
    for what in ("input", "param", "slot.exp_avg", "slot.exp_avg_sq", "slot.step", "update", "reproduced")
)
OF_LAYERS = (
    *(f"{layer}/{what}" for layer in LAYERS for what in ("input", "parameters", "output")),
    *("blocks.0/grad_input", "blocks.1/grad_input", "head/grad_input"),
    *("tokens/weight.grad", "positions/weight.grad", "head/weight.grad"),
    *(
        f"blocks.{block}.{part}.grad"
        for block in (0, 1)
        for part in ("norm1/weight", "norm2/bias", "attention.proj/weight", "up/weight", "down/bias")
    ),
)
REPLICATED = (*OF_LAYERS, *UPDATES, "state/parameters", "state/optimizer")
OWNED = (*OF_LAYERS, *UPDATES, "state/owned")
"""All that is compared of the GPT with AdamW, if ranks hold copies of its state, or parts of it."""


class Product(nn.Module):
    """Every token looks at those before it, or at all."""

    def __init__(self, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)


class Attention(nn.Module):
    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.product = Product(causal, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        rows, length, _ = qkv.shape
        y = self.product(*qkv.view(rows, length, 3, -1, WIDTH // HEADS).permute(2, 0, 3, 1, 4))
        return self.proj(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    """A Transformer layer, the norm before each half."""

    def __init__(self, causal: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal, dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def surfaces_of(net: nn.Module, prefix: str = "") -> set[str]:
    """What is compared of a GPT, or of those parts of one that a pipeline stage has."""
    first = [name for name in ("tokens", "positions") if getattr(net, name, None) is not None]
    later = [f"blocks.{name}" for name, _ in net.blocks.named_children()]
    later += ["head"] if net.head is not None else []
    weights = [name.rpartition(".") for name, _ in net.named_parameters() if not name.startswith("norm.")]
    found = {
        *(f"{part}/{what}" for part in first + later for what in ("input", "parameters", "output")),
        *(f"{part}/grad_input" for part in later),
        *(f"{owner}/{weight}.grad" for owner, _, weight in weights),
    }
    return {prefix + each for each in found}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.layers = nn.ModuleList([Residual(channels), Residual(channels)])
        self.classes = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for layer in self.layers:
            x = layer(x)
        return self.classes(x.mean((2, 3)))


def text(step: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of tokens, and the next one of each."""
    source = _seeded(step, rank, part)
    rows = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=source, device="cpu")
    rows = rows.to(torch.get_default_device())
    return rows[:, :-1], rows[:, 1:]


def images(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = _seeded(step, rank, 7)
    pixels = torch.randn(8, 3, 8, 8, generator=source, device="cpu")
    classes = torch.randint(0, 10, (8,), generator=source, device="cpu")
    return pixels.to(torch.get_default_device()), classes.to(torch.get_default_device())


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_on_text(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, row: int) -> None:
    """Train on this row of each step's text."""
    for step in job.steps():
        tokens, targets = text(step, row)
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()


def _seeded(step: int, rank: int, part: int) -> torch.Generator:
    return torch.Generator().manual_seed(step * 1000 + rank * 10 + part)
