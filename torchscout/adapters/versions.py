"""Checks at attach whether this release of a framework has what its adapter uses (paper, section 9).

The number of a release refuses nothing. Only names and parameters that are missing do, and they are named.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from torchscout.errors import ScoutError
from torchscout.log import log
from torchscout.utils.text import listed

__all__ = ["TESTED", "Uses", "advice", "missing", "require", "untried"]

TESTED = {
    "torchtitan": "0.3.0",
    "megatron-core": "0.16.1",
    "deepspeed": "0.19.8",
    "transformers": "5.22.2",
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
}
"""The newest release that torchscout was tried with, by the name of the distribution."""

Uses = Mapping[str, tuple[str, ...]]
"""The full name of each function or class that an adapter uses, and the parameters that it passes by name."""

Attributes = Iterable[tuple[object, str]]
"""Objects, and the names of their attributes that an adapter uses; ``training.seed`` is one of one."""


def require(distribution: str, version: str, uses: Uses, attributes: Attributes = ()) -> None:
    """Raise ``ScoutError`` with what this release lacks of what an adapter uses. If nothing is missing, but
    the release is of a series that torchscout was not tried with, log that on rank 0."""
    if lacking := [*missing(uses, attributes)]:
        raise ScoutError(f"{distribution} {version} has no {listed(lacking)}; {advice(distribution)}")
    from torch import distributed as dist  # ``scout doctor`` reads the table without PyTorch

    if (why := untried(distribution, version)) and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning("%s; what torchscout uses of it is still there", why)


def advice(distribution: str) -> str:
    """Return what to do about a release that lacks something."""
    return (
        f"{TESTED[distribution]} is the newest release that torchscout was tried with. Install that release, "
        "or set TORCHSCOUT=off to train without torchscout."
    )


def missing(uses: Uses, attributes: Attributes = ()) -> Iterator[str]:
    """Yield what is missing, each as the object of a sentence."""
    for path, parameters in uses.items():
        try:
            found = pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            yield path
            continue
        taken = inspect.signature(found).parameters.values() if parameters else ()
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            names = {each.name for each in taken}
            yield from (f"parameter {each} of {path}" for each in parameters if each not in names)
    yield from (
        f"{getattr(owner, '__name__', type(owner).__name__)}.{dotted}"
        for owner, dotted in attributes
        if not _has(owner, dotted)
    )


def _has(owner: object, dotted: str) -> bool:
    try:
        attrgetter(dotted)(owner)
    except AttributeError:
        return False
    return True


def untried(distribution: str, version: str) -> str | None:
    """Return a sentence if this release is of another series than the one that was tried, else None.

    Before 1.0 the minor version is the series. A source tree that does not know its release is not judged.
    """
    tried, found = _numbers(TESTED[distribution]), _numbers(version)
    places = 2 if tried[:1] == (0,) else 1
    if not any(found) or found[:places] == tried[:places]:
        return None
    than = "newer" if found > tried else "older"
    return (
        f"{distribution} {version} is {than} than {TESTED[distribution]}, the newest release that torchscout "
        "was tried with"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; suffixes such as ``+cu128`` or ``rc1`` are ignored."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
