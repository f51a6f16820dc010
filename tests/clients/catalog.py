"""Every client, on how many ranks it runs, and what a flipped bit of its weights must lead to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

from tests.clients import frameworks, language, optimizers, sharded, vision
from tests.clients.job import Job

Flip = Literal["named", "reported"]


@dataclass(frozen=True)
class Client:
    train: Callable[[Job], None]
    ranks: int = 3
    flip: Flip = "named"
    """What a changed weight on one rank leads to. ``named``: an incident with exactly that rank.
    ``reported``: an incident with that rank, perhaps among others, as no majority holds the same."""
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""
    patience: float = 1.0
    """How many times longer than others it may take: compilation, precisions that a CPU emulates."""
    not_slowed: str = ""
    """Why no layer of it can be made slow here, if so."""
    not_resumed: str = ""
    """Why it does not go on from our checkpoints, if so."""
    quick: bool = False
    """Whether it is trained in an ordinary test run as well."""

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


_NO_HOOK = "not tried: compiled code cannot hold the hook"

CLIENTS: dict[str, Client] = {
    "nanogpt": Client(language.fp32, quick=True),
    "nanogpt-bf16": Client(language.bf16, patience=3),
    "nanogpt-fp16": Client(language.fp16, patience=4),
    "nanogpt-compiled": Client(language.compiled, patience=3, not_slowed=_NO_HOOK),
    "nanogpt-float8": Client(language.float8),
    "nanogpt-accumulation": Client(language.accumulation),
    "activation-offload": Client(language.activation_offload),
    "checkpointing": Client(language.checkpointing),
    "checkpointing-reentrant": Client(language.checkpointing_reentrant),
    "custom-function": Client(language.custom_function),
    "lora": Client(language.lora),
    "reinforcement": Client(language.reinforcement),
    "lstm": Client(language.lstm),
    "muon-gathering": Client(optimizers.muon_gathering, quick=True),
    "sharded-by-hand": Client(optimizers.sharded_by_hand, flip="reported", quick=True),
    "zero-redundancy": Client(optimizers.zero_redundancy, flip="reported"),
    "torch-muon": Client(optimizers.torch_muon),
    "adafactor": Client(optimizers.adafactor),
    "resnet": Client(vision.resnet),
    "resnet-local-statistics": Client(vision.resnet_local_statistics),
    "vit": Client(vision.vit),
    "ema-averaged-model": Client(vision.ema_averaged_model),
    "ema-by-hand": Client(vision.ema_by_hand),
    "gan": Client(vision.gan),
    "gan-generator-only": Client(vision.gan_generator_only),
    "distillation": Client(vision.distillation),
    "fsdp2": Client(sharded.fsdp2, flip="reported"),
    "fsdp2-compiled": Client(sharded.fsdp2_compiled, flip="reported", patience=3, not_slowed=_NO_HOOK),
    "fsdp2-compiled-blocks": Client(
        sharded.fsdp2_compiled_blocks, flip="reported", patience=3, not_slowed=_NO_HOOK
    ),
    "hsdp": Client(sharded.hsdp, ranks=6),
    "tensor-parallel": Client(sharded.tensor_parallel, ranks=2, flip="reported"),
    "huggingface": Client(frameworks.huggingface_loop, needs=("transformers",)),
    "huggingface-trainer": Client(
        frameworks.huggingface_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("transformers", "accelerate"),
    ),
    "accelerate": Client(frameworks.accelerate_loop, needs=("transformers", "accelerate")),
    "lightning": Client(
        frameworks.lightning_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("lightning",),
    ),
    "lightning-fabric": Client(frameworks.fabric_loop, patience=2, needs=("lightning",)),
    "deepspeed-zero1": Client(partial(frameworks.deepspeed_zero, stage=1), patience=2, needs=("deepspeed",)),
    "deepspeed-zero3": Client(
        partial(frameworks.deepspeed_zero, stage=3), flip="reported", patience=2, needs=("deepspeed",)
    ),
    "deepspeed-zero2-offload": Client(
        partial(frameworks.deepspeed_zero, stage=2, offloads=True), patience=2, needs=("deepspeed",)
    ),
    "megatron": Client(partial(frameworks.megatron, sharded=False), patience=2, needs=("megatron",)),
    "megatron-distributed-optimizer": Client(
        partial(frameworks.megatron, sharded=True), patience=2, needs=("megatron",)
    ),
    "megatron-two-instances": Client(
        partial(frameworks.megatron, sharded=True, instances=2),
        ranks=4,
        flip="reported",
        patience=2,
        needs=("megatron",),
    ),
}

NOT_RUN = {
    "a ResNet with SyncBatchNorm": "PyTorch has it for GPUs only",
    "timm's ViT": "it imports torchvision, of which only a CUDA build was at hand; vit is written by hand",
    "torchvision's ResNet": "only a CUDA build was at hand; resnet is written by hand",
}
"""Clients that were asked for and have no program here."""
