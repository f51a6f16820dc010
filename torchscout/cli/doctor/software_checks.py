"""What the facts about installed software and devices mean for a job, as findings. Pure: ``probes`` gathers
the facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torchscout.adapters.versions import unknown
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


def backends(facts: TorchFacts) -> Finding:
    if facts.problem is not None:
        return skipped("backends", "torch could not be asked")
    if not facts.gloo:
        return fail(
            "backends",
            "torch has no Gloo, over which ranks vote, whatever training uses",
            "install a build of torch with torch.distributed and Gloo",
        )
    if facts.devices and not facts.nccl:
        return warn(
            "backends",
            "Gloo, but no NCCL, though there are CUDA devices",
            "install a build of torch with NCCL; tensors on devices cannot be compared over Gloo",
        )
    return ok("backends", "Gloo and NCCL" if facts.nccl else "Gloo; no NCCL, and no CUDA device to need it")


def cuda(facts: TorchFacts) -> Finding:
    if facts.problem is not None:
        return skipped("CUDA", "torch could not be asked")
    if facts.devices:
        counted = [f"{count} x {name}" for name, count in sorted(Counter(facts.devices).items())]
        return ok("CUDA", listed(counted))
    if facts.built_for is None:
        return skipped("CUDA", "this torch is built without it: training runs on CPUs")
    return warn(
        "CUDA",
        f"torch is built for CUDA {facts.built_for} and sees no device",
        "if there should be one: look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES",
    )


def triton(facts: TorchFacts) -> Finding:
    if not facts.devices:
        return skipped("Triton", "needed for tensors on CUDA devices only")
    if not facts.has_triton:
        return warn(
            "Triton",
            "not installed: signatures on devices are made by torch operations, many times slower",
            "pip install triton",
        )
    if facts.fused:
        return ok("Triton", "the fused signature runs on a device, and gives what the host gives")
    if facts.fused_problem is not None:
        return fail(
            "Triton",
            f"the fused signature does not run: {facts.fused_problem}",
            "install the Triton that belongs to this torch, and a C compiler",
        )
    return fail(
        "Triton",
        "the fused signature on a device is not what the host gives for the same tensor",
        "do not train on this machine before its device is tested",
    )


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


def attention(facts: TorchFacts) -> Finding:
    """Whether the fused backends repeat their numbers as replay runs them."""
    if not facts.devices:
        return skipped("attention", "fused backends that may not repeat run on CUDA devices only")
    if facts.attention is None:
        return warn("attention", "the fused backends could not be tried", "look at the lines above")
    running = {name: count for name, count in facts.attention.items() if count}
    noisy = [name for name, count in running.items() if count > 1]
    if noisy:
        return warn(
            "attention",
            f"{listed(noisy)} attention does not repeat its numbers under deterministic algorithms",
            "its gradients will be left out of comparisons; choose another backend to have them compared",
        )
    told = f"{listed([*running])} repeat their numbers as replay runs them" if running else "no fused backend"
    return ok("attention", told)


def surfaces(found: Mapping[str, str] | None) -> Finding:
    """What a run has left out of comparisons."""
    if found is None:
        return skipped("surfaces", "give --run-dir of a job to see which of its surfaces do not repeat")
    if not found:
        return ok("surfaces", "all that was compared in this run repeats")
    first, reason = next(iter(found.items()))
    return warn(
        "surfaces",
        f"{len(found)} of this run do not repeat and are not compared: {listed([*found])}. {first}: {reason}",
        "nothing, if that is known; ReplayConfig(require=...) certifies only what has them compared",
    )
