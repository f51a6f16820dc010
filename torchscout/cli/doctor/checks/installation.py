"""Versions: of Python, torch, what encrypts, and the frameworks that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchscout.adapters.versions import unknown
from torchscout.cli.doctor.facts import Finding, Installed, TorchFacts, fail, ok, skipped, warn
from torchscout.utils.text import listed

__all__ = ["curve", "frameworks", "python", "restarts", "torch"]

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 13)
_FSDP_TORCH = (2, 13)
_SHARED_STORE_TORCH = (2, 13)
"""Where torchrun was seen to hand ranks that it starts again a store that is gone."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def python(installed: Installed) -> Finding:
    version = installed.versions["Python"] or "unknown"
    if _numbers(version) < OLDEST_PYTHON:
        return fail("Python", version, f"use Python {_dotted(OLDEST_PYTHON)} or later")
    return ok("Python", version)


def torch(installed: Installed, facts: TorchFacts) -> Finding:
    supported = f"torch {_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    written = installed.versions.get("torch")
    if written is None:
        return fail("torch", "not installed", f"install {supported}")
    if facts.version is None:
        return fail("torch", f"{written} cannot be used: {facts.problem}", f"reinstall {supported}")
    version = _numbers(facts.version)
    if version < OLDEST_TORCH:
        return fail("torch", f"{facts.version} is too old", f"install {supported}")
    if version > NEWEST_TORCH:
        return warn("torch", f"torchscout was never tried with {facts.version}", f"install {supported}")
    if version < _FSDP_TORCH:
        return ok("torch", f"{facts.version}; FSDP layers are replayed with {_dotted(_FSDP_TORCH)} and later")
    return ok("torch", facts.version)


def restarts(facts: TorchFacts, environment: Mapping[str, str]) -> Finding:
    """Whether ranks that torchrun starts again find each other."""
    if facts.version is None or _numbers(facts.version) != _SHARED_STORE_TORCH:
        return skipped("restarts", f"only torch {_dotted(_SHARED_STORE_TORCH)} needs a setting for them")
    if environment.get(_OWN_STORE) == "1":
        return ok("restarts", f"{_OWN_STORE}=1: ranks that torchrun starts again find each other")
    return warn(
        "restarts",
        f"over Gloo with torch {facts.version}, ranks that torchrun starts again mostly fail "
        'with "Connection refused", or hang, with and without torchscout',
        f"start torchrun with {_OWN_STORE}=1",
    )


def curve(installed: Installed) -> Finding:
    version = installed.versions.get("pyzmq")
    if version is None:
        return fail("pyzmq", "not installed: observers cannot talk to each other", "pip install pyzmq")
    if not installed.curve:
        return fail(
            "pyzmq",
            f"{version}, built without CURVE: observers cannot encrypt what they say",
            "install pyzmq from its wheel, or build libzmq with libsodium",
        )
    return ok("pyzmq", f"{version}, with CURVE")


def frameworks(installed: Installed, names: tuple[str, ...]) -> Finding:
    there = [f"{name} {version}" for name in names if (version := installed.versions.get(name))]
    absent = listed((name for name in names if not installed.versions.get(name)), most=len(names))
    if not there:
        return skipped("frameworks", f"none is installed: neither {absent.replace(' and ', ' nor ')}")
    told = listed(there, most=len(names)) + (f"; absent: {absent}" if absent else "")
    versions = {name: installed.versions.get(name) for name in names}
    if strange := [why for name, each in versions.items() if each and (why := unknown(name, each))]:
        return warn("frameworks", f"{told}; {'; '.join(strange)}", "install the release that is known")
    return ok("frameworks", told)


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor; what follows, such as ``+cpu`` or ``rc1``, does not matter here."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
