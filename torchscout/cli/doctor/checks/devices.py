"""Backends, CUDA devices, Triton."""

from __future__ import annotations

from collections import Counter

from torchscout.cli.doctor.facts import Finding, TorchFacts, fail, ok, skipped, warn
from torchscout.utils.text import listed

__all__ = ["backends", "cuda", "triton"]


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
