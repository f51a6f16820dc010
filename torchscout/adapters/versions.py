"""Which releases of frameworks the adapters know (paper, section 9): see docs/frameworks/README.md."""

from __future__ import annotations

__all__ = ["TESTED", "unknown"]

TESTED = {
    "torchtitan": "0.3.0",
    "megatron-core": "0.16.1",
    "deepspeed": "0.19.8",
    "transformers": "5.22.2",
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
}
"""The release of each that the tests run with, by the name of its distribution."""


def unknown(distribution: str, version: str) -> str | None:
    """In one sentence what is wrong with a release of another series than the one that was tested.

    Before 1.0 every second number is a series. A tree of sources may not know its release, and is taken on
    trust.
    """
    known = _series(TESTED[distribution])
    if _series(version) in (known, ("0", "0")):
        return None
    return f"{distribution} {version} is not known here, {'.'.join(known)} is"


def _series(version: str) -> tuple[str, ...]:
    first, second, *_ = (*version.split("."), "")
    return (first, second) if first == "0" else (first,)
