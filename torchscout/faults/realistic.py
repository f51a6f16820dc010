"""Draws wrong numbers as they are seen in the field, from a seed.

By published measurements (arXiv 2605.04213) NaN or infinity is only about 1% of the outcomes of silent data
corruption, and single-bit flips are under 40% of bit-flip events: most corruptions are finite numbers, and
hit several bits. ``SHARES`` follows both figures; how the rest is divided is ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from torchscout.faults.fault import FIRST, Faults

__all__ = ["SHARES", "realistic"]

SHARES: Mapping[str, float] = {
    "one bit": 0.25,
    "several bits": 0.30,
    "periodic addresses": 0.14,
    "stuck bit": 0.08,
    "range": 0.12,
    "value": 0.10,
    "not finite": 0.01,
}
"""How often each kind is drawn, relative to the others. Of the first three, the bit flips, one in three is of
a single bit."""


def realistic(
    seed: int,
    *,
    steps: Sequence[int],
    ranks: Sequence[int],
    places: Mapping[str, int],
    width: int = 32,
    calls: range | None = FIRST,
) -> Faults:
    """One wrong number in each of ``steps``: on one of ``ranks``, at one of ``places``.

    ``places`` has the number of elements at each; ``width`` is that of an element, in bits. The same seed
    gives the same plan on every rank and in every run.
    """
    if not (steps and ranks and places):
        raise ValueError("a realistic plan needs steps, ranks and places to draw from")
    if empty := [at for at, elements in places.items() if elements < 1]:
        raise ValueError(f"there is no element at {empty[0]!r}")
    chance, faults = random.Random(seed), Faults()
    for step in steps:
        at = chance.choice(list(places))
        hit = {"rank": chance.choice(list(ranks)), "at": at, "step": step, "calls": calls}
        faults = _drawn(chance, faults, hit, places[at], width)
    return faults


def _drawn(chance: random.Random, faults: Faults, hit: dict[str, Any], elements: int, width: int) -> Faults:
    (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
    index, bit = chance.randrange(elements), chance.randrange(width)
    several = chance.sample(range(width), chance.randint(2, min(8, width)))
    if kind == "one bit":
        return faults.flip_bit(**hit, index=index, bit=bit)
    if kind == "several bits":
        return faults.flip_bits(**hit, index=index, bits=several)
    if kind == "periodic addresses":
        every = 2 ** chance.randint(1, max(1, elements.bit_length() - 2))
        return faults.flip_bits(**hit, index=chance.randrange(min(every, elements)), every=every, bits=[bit])
    if kind == "stuck bit":
        return faults.stick_bit(**hit, index=index, bit=bit, value=chance.randrange(2))
    if kind == "range":
        length = chance.randint(1, elements - index)
        return faults.overwrite(**hit, elements=range(index, index + length), seed=chance.getrandbits(32))
    wrong = chance.choice([math.nan, math.inf, -math.inf]) if kind == "not finite" else chance.gauss(0, 10)
    return faults.set_value(**hit, index=index, value=wrong)
