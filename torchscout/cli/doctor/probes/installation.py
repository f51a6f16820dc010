"""Which versions are installed. Imports none of them but ZeroMQ."""

from __future__ import annotations

import platform
from importlib import metadata

from torchscout.adapters.versions import TESTED
from torchscout.cli.doctor.facts import Installed

__all__ = ["FRAMEWORKS", "installed", "own_versions"]

FRAMEWORKS = tuple(TESTED)
_NEEDED = ("torchscout", "torch", "numpy", "xxhash", "pyzmq", "triton")


def installed() -> Installed:
    try:
        import zmq
    except ImportError:
        curve = False
    else:
        curve = bool(zmq.has("curve"))
    return Installed(own_versions(), curve)


def own_versions() -> dict[str, str | None]:
    """Of all that should be the same on all machines."""
    packages = {name: _version(name) for name in (*_NEEDED, *FRAMEWORKS)}
    return {"Python": platform.python_version(), **packages}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
