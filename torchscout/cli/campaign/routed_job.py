"""What the ranks of a mixture of experts run: training, with experts replayed at the shapes of a catalog."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchscout.attach import enable_resiliency
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.training import device_of
from torchscout.cli.moe_job import MoeTraining
from torchscout.cli.moe_model import HIDDEN, LAYERS, WIDTH, Experts
from torchscout.config import ReplayConfig, StragglerConfig
from torchscout.experts.kernel import expert_layer as counted
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan

__all__ = ["PROGRAMS", "TILE", "Job", "Told", "train"]

PROGRAMS, TILE = 2, (16, 16, 16, 2)
"""Of the interpreted kernel: rows and columns of a tile, a step, and row tiles that are done together."""
_EVER = 1e9
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """How long ranks train, and on what."""

    steps: int
    catalog: Path
    layers: int = LAYERS
    is_kernel: bool = False
    """Whether experts run on the grouped GEMM whose paths are counted."""
    is_interpreted: bool = True
    """Whether that is in Triton's interpreter, with small tiles, or on the device as it is used there."""

    @property
    def replay(self) -> ReplayConfig:
        """Experts alone, shape by shape. A kernel that falls ill is another program, and not as fast."""
        straggler = StragglerConfig(material_ms=_EVER) if self.is_kernel else StragglerConfig()
        return ReplayConfig(interval=1, recipes=("experts",), catalog=self.catalog, straggler=straggler)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to tell."""

    fired: list[Firing]
    failures: list[str]
    cycles: int
    """Over all shapes and layers, of checks that were accepted."""
    applied: int
    """How often the kernel says that it was perturbed."""


def train(rank: int, layout: Layout, faults: FaultPlan, run_dir: Path, seed: int, job: Job) -> Told:
    """A check after each step, of experts alone: a census of all weights would not need their shapes."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())  # the campaign tells what was found
    warnings.filterwarnings("ignore", module="torch")  # of nothing that a small job could do about
    make = _on_kernel(is_interpreted=job.is_interpreted) if job.is_kernel else Experts
    training = MoeTraining(layout.mesh(), seed, layers=job.layers, make=make, device=device_of(layout))
    with (
        Injector(faults, rank, training.model, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=job.replay,
            observer=None,
            parallelism=training.parallelism,
            run_dir=run_dir,
        ) as session,
    ):
        for step in range(1, job.steps + 1):
            training.step(step)
        replay = session.status()["replay"]
        failures = [*session.failures, *([replay["lacking"]] if replay["lacking"] else [])]
        if not faults:  # where state differs, what is computed from it is not compared
            unchecked = replay["not_checked"]
            failures += [f"{surface} is not checked: {reason}" for surface, reason in unchecked.items()]
        cycles = replay["coverage"]["experts"]["cycles"]
        return Told(injector.fired, failures, cycles, _applied() if job.is_kernel else 0)


def _on_kernel(*, is_interpreted: bool) -> Callable[[int], nn.Module]:
    """Makes experts on a grouped GEMM that may fall ill; Triton is needed here alone."""
    from torchscout.cli.campaign.interpreter import hasten
    from torchscout.experts.kernel.grouped_gemm import Tiling, programs_of
    from torchscout.faults.faulty_gemm import FaultyGemm

    def gemm(hidden: int, intermediate: int, device: torch.device) -> FaultyGemm:
        if is_interpreted:
            return FaultyGemm(hidden, intermediate, programs=PROGRAMS, tiling=Tiling(*TILE))
        return FaultyGemm(hidden, intermediate, programs=programs_of(device))

    hasten()
    return lambda count: counted.Experts(count, WIDTH, HIDDEN, gemm=gemm)


def _applied() -> int:
    from torchscout.faults.faulty_gemm import times_applied

    return times_applied()
