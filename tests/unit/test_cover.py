"""The minimum cover, against brute force; what check_cover says when something is missing."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.grouped_gemm_oracle import PASSES, counts_of
from torchscout.experts.coverage import Rows, ShapeProfile, check_cover, minimum_cover, uniform


class Tiling(NamedTuple):
    rows: int
    columns: int
    step: int


def drawn(seed: int, shapes: int, paths: int, most: int) -> dict[Rows, ShapeProfile]:
    random_ = random.Random(seed)
    return {
        (rows,): ShapeProfile.of(
            random_.choice(["idle", "full"]), {f"p{path}": random_.randint(0, most) for path in range(paths)}
        )
        for rows in range(shapes)
    }


def fewest(profiles: dict[Rows, ShapeProfile]) -> int:
    """By trying every set of shapes, smaller ones first."""
    for size in range(len(profiles) + 1):
        for chosen in itertools.combinations(profiles.values(), size):
            if all(any(each.covers(profile) for each in chosen) for profile in profiles.values()):
                return size
    raise AssertionError


@pytest.mark.parametrize("seed", range(40))
def test_no_smaller_cover_exists(seed: int):
    profiles = drawn(seed, shapes=9, paths=1 + seed % 4, most=1 + seed % 3)
    chosen = minimum_cover(profiles)
    check = check_cover(profiles, chosen)
    assert len(chosen) == fewest(profiles)
    assert check.complete
    assert not check.redundant
    assert check.covered == check.occurrences == sum(each.occurrences for each in profiles.values())


def test_of_equal_profiles_the_smallest_shape_is_kept_whatever_the_order():
    profile = ShapeProfile.of("full", {"interior": 2})
    shapes = [(3, 1), (0, 4), (2, 2), (4, 0), (9, 9)]
    for order in itertools.permutations(shapes):
        assert minimum_cover(dict.fromkeys(order, profile)) == ((0, 4),)


def test_a_shape_in_another_regime_covers_nothing():
    profiles = {
        (1,): ShapeProfile.of("idle", {"interior": 1}),
        (9,): ShapeProfile.of("full", {"interior": 9, "tail": 9}),
    }
    assert minimum_cover(profiles) == ((1,), (9,))


def test_a_path_listed_with_zero_is_a_path_not_listed():
    listed = ShapeProfile.of("full", {"interior": 1, "tail": 0})
    assert listed == ShapeProfile.of("full", {"interior": 1})
    assert listed.covers(ShapeProfile.of("full", {"interior": 1}))
    assert not listed.covers(ShapeProfile.of("full", {"tail": 1}))
    assert minimum_cover({(1,): ShapeProfile.of("full", {}), (2,): listed}) == ((2,),)


def test_the_check_finds_what_a_wrong_cover_leaves_out():
    profiles = {
        (1,): ShapeProfile.of("full", {"interior": 5, "tail": 1}),
        (2,): ShapeProfile.of("full", {"interior": 3, "tail": 4}),
        (3,): ShapeProfile.of("full", {"interior": 3}),
        (4,): ShapeProfile.of("idle", {"interior": 2}),
    }
    check = check_cover(profiles, [(1,), (3,)])
    assert check.uncovered == ((2,), (4,))
    assert check.redundant == ((3,),)
    assert (check.occurrences, check.covered) == (18, 6 + 3 + 1 + 3)
    assert not check.complete


@pytest.mark.parametrize("chain", [True, False])
def test_a_whole_catalog_of_shapes_is_compressed(chain: bool):
    """The paper's largest one, both where one shape covers all and where none covers another."""
    paths = [f"path {number}" for number in range(40)]
    counts = np.arange(3457)[:, None] * np.ones((1, 40), dtype=int)
    if not chain:
        counts[:, 1] = 3457 - counts[:, 0]
    profiles = {
        (rows,): ShapeProfile.of("full", dict(zip(paths, map(int, each), strict=True)))
        for rows, each in enumerate(counts)
    }
    assert len(minimum_cover(profiles)) == (1 if chain else 3457)


def test_a_fault_at_any_occurrence_of_any_path_of_any_shape_is_met_by_a_selected_one():
    """Of the paths of a kernel for three experts with tiles of 16 rows, alone and several at once."""
    tiling, programs = Tiling(rows=16, columns=16, step=16), 5
    profiles: dict[Rows, ShapeProfile] = {}
    for rows in range(200):
        counts = counts_of(uniform(rows, 3), 24, 16, tiling, programs)
        idle = [which for which in PASSES if counts.get(f"{which}/last_tile", 0) < programs]
        profiles[uniform(rows, 3)] = ShapeProfile.of(f"idle in {idle}", counts)
    selected = [profiles[rows] for rows in minimum_cover(profiles)]
    assert len(selected) < len(profiles) / 10

    def is_met(regime: str, needed: dict[str, int]) -> bool:
        """Whether the fault fires: in its regime, once each path has run so often."""
        return any(
            each.fingerprint == regime
            and all(dict(each.path_counts).get(path, 0) >= count for path, count in needed.items())
            for each in selected
        )

    chance = random.Random(0)
    for profile in profiles.values():
        for path, count in profile.path_counts:
            assert is_met(profile.fingerprint, {path: count})
            assert is_met(profile.fingerprint, {path: chance.randint(1, count)})
        several = chance.sample(profile.path_counts, k=len(profile.path_counts) // 2)
        assert is_met(profile.fingerprint, dict(several))
    most = max(count for profile in profiles.values() for _, count in profile.path_counts)
    assert not is_met(selected[0].fingerprint, {selected[0].path_counts[0][0]: most + 1})
