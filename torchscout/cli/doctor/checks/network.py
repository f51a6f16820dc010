"""Whether observers reach a board, and what is different on the other machine (paper, section 7)."""

from __future__ import annotations

from collections.abc import Mapping

from torchscout.cli.doctor.facts import Finding, Met, Reached, fail, ok, skipped, warn
from torchscout.config import ObserverConfig

__all__ = ["board", "other_clock", "other_machine", "other_versions"]

_ORDERLY_SECONDS = 1.0
"""Wall clocks that differ by more put the machines' records into a wrong order."""


def board(reached: Reached, machines: int) -> Finding:
    where = reached.address if reached.port is None else f"{reached.address}:{reached.port}"
    settings = "ObserverConfig.address (an interface or address of this machine) and ObserverConfig.port"
    if reached.problem is not None or reached.seconds is None:
        return fail("board", f"{where}: {reached.problem}", f"set {settings}, and let TCP through")
    answered = f"one at {where} answers in {1000 * reached.seconds:.1f} ms"
    if not reached.is_local:
        return ok("board", answered)
    if machines > 1:
        return fail("board", f"{answered}, but other machines cannot use that address", f"set {settings}")
    return warn(
        "board", f"{answered}; other machines could not use that address", f"if there are any, set {settings}"
    )


def other_machine(met: Met) -> Finding:
    if met.problem is not None or met.seconds is None:
        return fail(
            "other machine",
            f"{met.address}: {met.problem}",
            "run `scout doctor --listen` there; let TCP through to its port, or choose one with --port",
        )
    slow = ObserverConfig().failover_seconds
    if met.seconds > slow:
        return warn(
            "other machine",
            f"{met.host} answers after {met.seconds:.2f} s at best: hubs that slow are given up",
            f"raise ObserverConfig.failover_seconds above {met.seconds:.1f}, or look at the network",
        )
    return ok("other machine", f"{met.host} answers in {1000 * met.seconds:.1f} ms")


def other_clock(met: Met) -> Finding:
    if met.offset is None or met.seconds is None:
        return skipped("wall clock", "the other machine did not tell its own")
    apart = f"that of {met.host} is {abs(met.offset):.3f} s {'ahead' if met.offset > 0 else 'behind'}"
    if abs(met.offset) - met.seconds / 2 > _ORDERLY_SECONDS:
        return warn(
            "wall clock",
            f"{apart}: times in records of both machines cannot be compared",
            "let both follow one time server (NTP); no decision depends on it",
        )
    return ok("wall clock", apart)


def other_versions(met: Met, own: Mapping[str, str | None]) -> Finding:
    """Replicas are compared bit by bit, so that they must run the same kernels."""
    if met.versions is None:
        return skipped("same versions", "the other machine did not tell its own")
    differing = sorted(name for name in {*own, *met.versions} if own.get(name) != met.versions.get(name))
    if not differing:
        return ok("same versions", f"as on {met.host}")
    told = "; ".join(f"{name} {own.get(name)} here, {met.versions.get(name)} there" for name in differing)
    return warn("same versions", told, "install the same on all machines: replicas are compared bit by bit")
