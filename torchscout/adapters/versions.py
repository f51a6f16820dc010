"""The framework releases that adapters are tested with (paper, section 9); see docs/frameworks/README.md."""

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
"""The tested release, by the name of the distribution."""


def unknown(distribution: str, version: str) -> str | None:
    """Return a sentence if this release is of another series than the tested one, else None.

    Before 1.0 the minor version is the series. A source tree that does not know its release is accepted.
    """
    known = _series(TESTED[distribution])
    if _series(version) in (known, ("0", "0")):
        return None
    return f"{distribution} {version} is not supported; torchscout supports {'.'.join(known)}"


def _series(version: str) -> tuple[str, ...]:
    first, second, *_ = (*version.split("."), "")
    return (first, second) if first == "0" else (first,)
