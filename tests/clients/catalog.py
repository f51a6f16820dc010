"""Every client, on how many ranks it runs, and what a flipped bit of its weights must lead to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from tests.clients import optimizers, sharded, vision
from tests.clients.job import Job

__all__ = ["CLIENTS", "NOT_RUN", "Client"]

Flip = Literal["named", "reported", "declared"]


@dataclass(frozen=True)
class Client:
    train: Callable[[Job], None]
    ranks: int = 3
    flip: Flip = "named"
    """What a changed weight on one rank leads to. ``named``: an incident with exactly that rank.
    ``reported``: an incident with that rank among others, as no majority holds the same. ``declared``: it may
    be missed, if the status says that this state is not covered."""
    needs: tuple[str, ...] = ()
    """Packages that must be installed."""
    quick: bool = False
    """Whether it is trained in an ordinary test run as well."""

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


CLIENTS: dict[str, Client] = {
    "muon-gathering": Client(optimizers.muon_gathering),
    "sharded-by-hand": Client(optimizers.sharded_by_hand),
    "zero-redundancy": Client(optimizers.zero_redundancy),
    "torch-muon": Client(optimizers.torch_muon),
    "adafactor": Client(optimizers.adafactor),
    "resnet": Client(vision.resnet),
    "resnet-local-statistics": Client(vision.resnet_local_statistics),
    "resnet-sync-batch-norm": Client(vision.resnet_sync_batch_norm),
    "vit": Client(vision.vit),
    "ema-averaged-model": Client(vision.ema_averaged_model),
    "ema-by-hand": Client(vision.ema_by_hand),
    "gan": Client(vision.gan),
    "gan-generator-only": Client(vision.gan_generator_only),
    "distillation": Client(vision.distillation),
    "fsdp2": Client(sharded.fsdp2, flip="reported"),
    "hsdp": Client(sharded.hsdp, ranks=6),
    "tensor-parallel": Client(sharded.tensor_parallel, ranks=2, flip="reported"),
}

NOT_RUN = {
    name: package
    for name, package in {
        "Lightning": "lightning",
        "Lightning Fabric": "lightning_fabric",
        "timm's own ViT": "timm",
        "torchvision's own ResNet": "torchvision",
    }.items()
    if find_spec(package) is None
}
"""Clients that were asked for and have no program here, as their package is not installed."""
