"""Names the sick rank, machine or process group of a distributed training job while it runs.

Public names are imported on first use, so that the hang observer does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchscout.attach import enable_resiliency
    from torchscout.c3.signature import signature, signatures
    from torchscout.config import (
        CheckpointConfig,
        ObserverConfig,
        Parallelism,
        RecoveryConfig,
        ReplayConfig,
    )
    from torchscout.decision.types import (
        Action,
        EvidenceRecord,
        Incident,
        Manifestation,
        Scope,
        Status,
        Verdict,
    )
    from torchscout.errors import ScoutError
    from torchscout.mesh import Mesh, MeshAddress, PeerGroup
    from torchscout.run.notify import Webhook
    from torchscout.session.session import Session

__version__ = "0.1.0"

_MODULES = {
    "attach": ("enable_resiliency",),
    "config": ("CheckpointConfig", "ObserverConfig", "Parallelism", "RecoveryConfig", "ReplayConfig"),
    "decision.types": (
        "Action",
        "EvidenceRecord",
        "Incident",
        "Manifestation",
        "Scope",
        "Status",
        "Verdict",
    ),
    "c3.signature": ("signature", "signatures"),
    "errors": ("ScoutError",),
    "mesh": ("Mesh", "MeshAddress", "PeerGroup"),
    "run.notify": ("Webhook",),
    "session.session": ("Session",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Action",
    "CheckpointConfig",
    "EvidenceRecord",
    "Incident",
    "Manifestation",
    "Mesh",
    "MeshAddress",
    "ObserverConfig",
    "Parallelism",
    "PeerGroup",
    "RecoveryConfig",
    "ReplayConfig",
    "Scope",
    "ScoutError",
    "Session",
    "Status",
    "Verdict",
    "Webhook",
    "enable_resiliency",
    "signature",
    "signatures",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
