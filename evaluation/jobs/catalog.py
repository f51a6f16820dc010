"""Every job, by name."""

from __future__ import annotations

from evaluation.jobs import (
    compiled,
    context,
    deepspeed,
    frameworks,
    language,
    megatron,
    mixture,
    optimizers,
    pipeline,
    plain,
    sharded,
    tensor,
    titan,
    vision,
)
from evaluation.jobs.entry import Entry

CATALOG: dict[str, Entry] = {
    **language.JOBS,
    **plain.JOBS,
    **optimizers.JOBS,
    **vision.JOBS,
    **sharded.JOBS,
    **compiled.JOBS,
    **tensor.JOBS,
    **pipeline.JOBS,
    **context.JOBS,
    **mixture.JOBS,
    **frameworks.JOBS,
    **megatron.JOBS,
    **deepspeed.JOBS,
    **titan.JOBS,
}

NOT_RUN = {
    "a ResNet with SyncBatchNorm": "PyTorch has it for GPUs only",
    "timm's ViT": "it imports torchvision, of which only a CUDA build was at hand; vit is written by hand",
    "torchvision's ResNet": "only a CUDA build was at hand; resnet is written by hand",
}
"""Programs that were asked for and are not here."""
