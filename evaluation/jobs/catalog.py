"""Every job, on how many ranks it runs, what must be compared of it, and what its faults must lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Literal

from evaluation.jobs import frameworks, language, optimizers, sharded, vision
from evaluation.jobs.job import Job

Flip = Literal["named", "reported"]
REPLAY = range(1, 400)
"""The calls of a place in a step that are not training's own, however often it is replayed."""


@dataclass(frozen=True)
class Wrong:
    """A bit that is wrong in one place on one rank, and the first incident that must come of it."""

    at: str
    """As ``FaultPlan`` names it: ``stack.1/output``, ``stack.1.up/weight.exp_avg``, ``all_reduce@dp``."""
    rank: int
    surface: str = ""
    """Where it is seen; as ``at`` if not given."""
    calls: range | None = REPLAY
    """Which calls of the place in the step; ``range(1)`` for what a rank holds."""
    step: int = 2
    bit: int = 20
    scope: str = "rank"
    named: tuple[int, ...] = ()
    """Who is named; the rank if not given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "surface", self.surface or self.at)
        object.__setattr__(self, "named", self.named or (self.rank,))


@dataclass(frozen=True)
class Entry:
    train: Callable[[Job], None]
    ranks: int = 3
    flip: Flip = "named"
    """What a changed weight on one rank leads to. ``named``: an incident with exactly that rank.
    ``reported``: an incident with that rank, perhaps among others, as no majority holds the same."""
    compared: frozenset[str] = frozenset()
    """What every rank must have compared after 20 healthy steps, at least."""
    unchecked: tuple[str, ...] = ("*",)
    """Patterns of what may be left out of a comparison; empty where everything must be compared."""
    wrong: Mapping[str, Wrong] = field(default_factory=dict)
    """Wrong numbers that must be named, by a short name."""
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""
    patience: float = 1.0
    """How many times longer than others it may take: compilation, precisions that a CPU emulates."""
    not_slowed: str = ""
    """Why no layer of it can be made slow here, if so."""
    not_resumed: str = ""
    """Why it does not go on from our checkpoints, if so."""

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


_NO_HOOK = "not tried: compiled code cannot hold the hook"

CATALOG: dict[str, Entry] = {
    "nanogpt": Entry(language.fp32),
    "nanogpt-bf16": Entry(language.bf16, patience=3),
    "nanogpt-fp16": Entry(language.fp16, patience=4),
    "nanogpt-compiled": Entry(language.compiled, patience=3, not_slowed=_NO_HOOK),
    "nanogpt-float8": Entry(language.float8),
    "nanogpt-accumulation": Entry(language.accumulation),
    "activation-offload": Entry(language.activation_offload),
    "checkpointing": Entry(language.checkpointing),
    "checkpointing-reentrant": Entry(
        language.checkpointing_reentrant,
        not_slowed="layers that use_reentrant=True recomputes are not replayed",
    ),
    "custom-function": Entry(language.custom_function),
    "lora": Entry(language.lora),
    "reinforcement": Entry(language.reinforcement),
    "lstm": Entry(language.lstm),
    "muon-gathering": Entry(optimizers.muon_gathering),
    "sharded-by-hand": Entry(optimizers.sharded_by_hand, flip="reported"),
    "zero-redundancy": Entry(optimizers.zero_redundancy, flip="reported"),
    "torch-muon": Entry(optimizers.torch_muon),
    "adafactor": Entry(optimizers.adafactor),
    "resnet": Entry(vision.resnet),
    "resnet-local-statistics": Entry(vision.resnet_local_statistics),
    "vit": Entry(vision.vit),
    "ema-averaged-model": Entry(vision.ema_averaged_model),
    "ema-by-hand": Entry(vision.ema_by_hand),
    "gan": Entry(vision.gan),
    "gan-generator-only": Entry(
        vision.gan_generator_only, not_resumed="the discriminator's state is not registered"
    ),
    "distillation": Entry(vision.distillation),
    "fsdp2": Entry(sharded.fsdp2, flip="reported"),
    "fsdp2-compiled": Entry(sharded.fsdp2_compiled, flip="reported", patience=3, not_slowed=_NO_HOOK),
    "fsdp2-compiled-blocks": Entry(
        sharded.fsdp2_compiled_blocks, flip="reported", patience=3, not_slowed=_NO_HOOK
    ),
    "hsdp": Entry(sharded.hsdp, ranks=6),
    "tensor-parallel": Entry(
        sharded.tensor_parallel, ranks=2, flip="reported", not_slowed="no other rank does the same work"
    ),
    "huggingface": Entry(frameworks.huggingface_loop, needs=("transformers",)),
    "huggingface-trainer": Entry(
        frameworks.huggingface_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("transformers", "accelerate"),
    ),
    "accelerate": Entry(frameworks.accelerate_loop, needs=("transformers", "accelerate")),
    "lightning": Entry(
        frameworks.lightning_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("lightning",),
    ),
    "lightning-fabric": Entry(frameworks.fabric_loop, patience=2, needs=("lightning",)),
    "deepspeed-zero1": Entry(partial(frameworks.deepspeed_zero, stage=1), patience=2, needs=("deepspeed",)),
    "deepspeed-zero3": Entry(
        partial(frameworks.deepspeed_zero, stage=3), flip="reported", patience=2, needs=("deepspeed",)
    ),
    "deepspeed-zero2-offload": Entry(
        partial(frameworks.deepspeed_zero, stage=2, offloads=True), patience=2, needs=("deepspeed",)
    ),
    "megatron": Entry(partial(frameworks.megatron, sharded=False), patience=2, needs=("megatron",)),
    "megatron-distributed-optimizer": Entry(
        partial(frameworks.megatron, sharded=True), patience=2, needs=("megatron",)
    ),
    "megatron-two-instances": Entry(
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
"""Programs that were asked for and are not here."""
