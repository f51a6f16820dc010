"""Lets the real TorchTitan 0.3.0 train on CUDA with PyTorch 2.11; to be imported before it.

TorchTitan's own code stays as it is. It expects a PyTorch newer than 2.13, and packages that are too large to
be brought to a machine on which nothing can be installed. Only what is missing gets a stand-in.
"""

from __future__ import annotations

import json
import random
import sys
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp


@dataclass(frozen=True)
class _MeshDims:
    """FSDP's names of mesh axes, which only TorchTitan's ``full_dtensor`` and ``spmd_types`` use."""

    shard: Any = None
    replicate: Any = None


class _Texts(list):
    """What TorchTitan asks of a Hugging Face dataset."""

    def skip(self, count: int) -> _Texts:
        return _Texts(self[count:])

    def shuffle(self, seed: int) -> _Texts:
        return _Texts(random.Random(seed).sample(self, len(self)))


def _load(path: str, **_: Any) -> _Texts:
    return _Texts(json.loads(line) for line in (Path(path) / "data.json").read_text().splitlines())


def _split(texts: _Texts, rank: int, ranks: int) -> _Texts:
    return _Texts(texts[rank::ranks])


class _NoWriter:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("tensorboard is not installed")


def _stand_in(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def prepare() -> None:
    """In a rank that is going to train."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: dist.distributed_c10d._set_pg_timeout(timeout, group)


if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    torch.distributed.fsdp.DataParallelMeshDims = _MeshDims  # type: ignore[attr-defined]
if find_spec("datasets") is None:
    _stand_in("datasets", Dataset=_Texts, load_dataset=_load)
    _stand_in("datasets.distributed", split_dataset_by_node=_split)
if find_spec("tensorboard") is None:
    _stand_in("torch.utils.tensorboard", SummaryWriter=_NoWriter)
