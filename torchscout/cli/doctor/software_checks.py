"""Findings from facts about installed software and devices. Pure functions: ``probes`` gathers the facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torchscout.adapters.versions import untried
from torchscout.cli.doctor.facts import Finding, Installed, TorchFacts, fail, ok, skipped, warn
from torchscout.utils.text import listed

__all__ = [
    "attention",
    "backends",
    "cuda",
    "curve",
    "frameworks",
    "python",
    "restarts",
    "surfaces",
    "torch",
    "triton",
]


# The versions that installed ones are compared with.
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 13)
FSDP_TORCH = (2, 13)
"""The oldest with which FSDP layers are replayed."""
SHARED_STORE_TORCH = (2, 13)
"""In this version, torchrun gives ranks that it restarts a store that no longer exists."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def backends(facts: TorchFacts) -> Finding:
    if facts.problem is not None:
        return skipped("backends", "torch cannot be imported")
    if not facts.gloo:
        return fail(
            "backends",
            "torch has no Gloo, which ranks need for votes, whatever backend training uses",
            "install a build of torch with torch.distributed and Gloo",
        )
    if facts.devices and not facts.nccl:
        return warn(
            "backends",
            "Gloo, but no NCCL, although there are CUDA devices",
            "install a build of torch with NCCL; tensors on devices cannot be compared over Gloo",
        )
    return ok(
        "backends", "Gloo and NCCL" if facts.nccl else "Gloo; no NCCL, and no CUDA device that needs it"
    )


def cuda(facts: TorchFacts) -> Finding:
    if facts.problem is not None:
        return skipped("CUDA", "torch cannot be imported")
    if facts.devices:
        counted = [f"{count} x {name}" for name, count in sorted(Counter(facts.devices).items())]
        return ok("CUDA", listed(counted))
    if facts.built_for is None:
        return skipped("CUDA", "this torch is built without CUDA: training runs on CPUs")
    return warn(
        "CUDA",
        f"torch is built for CUDA {facts.built_for}, but finds no device",
        "if there should be one, check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES",
    )


def triton(facts: TorchFacts) -> Finding:
    if not facts.devices:
        return skipped("Triton", "needed for tensors on CUDA devices only")
    if not facts.has_triton:
        return warn(
            "Triton",
            "not installed: signatures on devices are computed by torch operations, many times slower",
            "pip install triton",
        )
    if facts.fused:
        return ok("Triton", "the fused signature on a device equals that of the host")
    if facts.fused_problem is not None:
        return fail(
            "Triton",
            f"the fused signature does not run: {facts.fused_problem}",
            "install the Triton that belongs to this torch, and a C compiler",
        )
    return fail(
        "Triton",
        "the fused signature on a device differs from that of the host for the same tensor",
        "do not train on this machine until its device has been tested",
    )


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
        return warn("torch", f"torchscout has not been tested with {facts.version}", f"install {supported}")
    if version < FSDP_TORCH:
        return ok(
            "torch", f"{facts.version}; FSDP layers are replayed only with {_dotted(FSDP_TORCH)} and later"
        )
    return ok("torch", facts.version)


def restarts(facts: TorchFacts, environment: Mapping[str, str]) -> Finding:
    """Whether ranks that torchrun restarts can connect."""
    if facts.version is None or _numbers(facts.version) != SHARED_STORE_TORCH:
        return skipped("restarts", f"only torch {_dotted(SHARED_STORE_TORCH)} needs a setting")
    if environment.get(_OWN_STORE) == "1":
        return ok("restarts", f"{_OWN_STORE}=1: ranks that torchrun restarts can connect")
    return warn(
        "restarts",
        f"over Gloo with torch {facts.version}, ranks that torchrun restarts mostly fail with "
        '"Connection refused", or hang, even without torchscout',
        f"start torchrun with {_OWN_STORE}=1",
    )


def curve(installed: Installed) -> Finding:
    version = installed.versions.get("pyzmq")
    if version is None:
        return fail("pyzmq", "not installed: observers cannot communicate", "pip install pyzmq")
    if not installed.curve:
        return fail(
            "pyzmq",
            f"{version}, built without CURVE: observers cannot encrypt their messages",
            "install pyzmq from its wheel, or build libzmq with libsodium",
        )
    return ok("pyzmq", f"{version}, with CURVE")


def frameworks(installed: Installed, names: tuple[str, ...]) -> Finding:
    there = [f"{name} {version}" for name in names if (version := installed.versions.get(name))]
    absent = listed((name for name in names if not installed.versions.get(name)), most=len(names))
    if not there:
        return skipped("frameworks", f"none is installed: neither {absent.replace(' and ', ' nor ')}")
    found = listed(there, most=len(names)) + (f"; not installed: {absent}" if absent else "")
    versions = {name: installed.versions.get(name) for name in names}
    if strange := [why for name, each in versions.items() if each and (why := untried(name, each))]:
        return warn("frameworks", f"{found}; {'; '.join(strange)}", "read the log when torchscout attaches")
    return ok("frameworks", found)


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor version; suffixes such as ``+cpu`` or ``rc1`` are ignored."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def attention(facts: TorchFacts) -> Finding:
    """Whether the fused backends are deterministic as replay runs them."""
    if not facts.devices:
        return skipped("attention", "only CUDA devices have fused backends that may be nondeterministic")
    if facts.attention is None:
        return warn("attention", "the fused backends could not be tried", "see the lines above")
    running = {name: count for name, count in facts.attention.items() if count}
    noisy = [name for name, count in running.items() if count > 1]
    if noisy:
        return warn(
            "attention",
            f"{listed(noisy)} attention is nondeterministic even under deterministic algorithms",
            "its gradients will not be compared; use another backend to have them compared",
        )
    return ok(
        "attention", f"{listed([*running])}: deterministic in replay" if running else "no fused backend"
    )


def surfaces(found: Mapping[str, str] | None) -> Finding:
    """The surfaces of a run that are not compared because they are nondeterministic."""
    if found is None:
        return skipped(
            "surfaces", "give --run-dir of a job to see which of its surfaces are nondeterministic"
        )
    if not found:
        return ok("surfaces", "all surfaces of this run are deterministic")
    first, reason = next(iter(found.items()))
    return warn(
        "surfaces",
        f"{len(found)} of this run are nondeterministic, and not compared: {listed([*found])}. "
        f"{first}: {reason}",
        "if that is not expected, ReplayConfig(require=...) certifies only what has them compared",
    )
