"""Kernels and surfaces whose numbers do not repeat."""

from __future__ import annotations

from collections.abc import Mapping

from torchscout.cli.doctor.facts import Finding, TorchFacts, ok, skipped, warn
from torchscout.utils.text import listed

__all__ = ["attention", "surfaces"]


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
