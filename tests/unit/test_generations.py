"""Which generation all ranks load and from where: every case of few ranks, and the words for the rest."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.support.replica_ranks import identity, seal
from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.resume.plan import Listing, ShardLocation, Source, agree
from torchscout.checkpoint.storage.inventory import FoundShard, Inventory, Member, Tier, inventory
from torchscout.checkpoint.storage.shards import path_of
from torchscout.errors import CheckpointError

NEW, OLD = Generation(8), Generation(6)
MEMORY, DISK = Tier.MEMORY, Tier.DISK
MEMBER = Member(job="job", mesh="replica=2", world_size=2, rank=0)


def listings(*finders: list[ShardLocation]) -> list[Listing]:
    return [Listing(frozenset(copies)) for copies in finders]


def of_both(rank: int, *places: tuple[Tier, int]) -> list[ShardLocation]:
    return [
        ShardLocation(rank, generation, tier, holder) for generation in (NEW, OLD) for tier, holder in places
    ]


def test_what_all_ranks_have_is_taken_from_where_it_is_nearest():
    """Every choice of the eight places that two ranks' copies of one generation can be in."""
    places = [
        (reader, ShardLocation(rank, NEW, tier, reader))
        for reader, rank, tier in product((0, 1), (0, 1), Tier)
    ]
    for count in range(len(places) + 1):
        for chosen in combinations(places, count):
            inventories = listings(*([copy for reader, copy in chosen if reader == each] for each in (0, 1)))
            plan = agree(inventories, [NEW])
            for rank in (0, 1):
                other = 1 - rank
                order = [(rank, MEMORY), (rank, DISK), (other, MEMORY), (other, DISK)]
                there = [
                    place
                    for place in order
                    if (place[0], ShardLocation(rank, NEW, place[1], place[0])) in chosen
                ]
                if plan.generation is None:
                    continue
                assert plan.sources[rank] == Source(*there[0], there[0][0])
            had = {copy.rank for _, copy in chosen}
            assert (plan.generation == NEW) == (had == {0, 1})


def test_never_two_generations_at_once():
    """Every way in which three ranks hold any of three generations."""
    generations = [Generation(9), NEW, OLD]
    subsets = [each for count in range(4) for each in combinations(generations, count)]
    for held in product(subsets, repeat=3):
        inventories = listings(
            *([ShardLocation(rank, each, MEMORY, rank) for each in had] for rank, had in enumerate(held))
        )
        common = [each for each in generations if all(each in had for had in held)]
        plan = agree(inventories, generations)
        assert plan.generation == (common[0] if common else None)
        newer = generations[: generations.index(common[0])] if common else generations
        assert [generation for generation, _ in plan.passed] == newer


def test_only_what_is_wanted_is_taken_and_in_that_order():
    inventories = listings(of_both(0, (MEMORY, 0)), of_both(1, (MEMORY, 1)))
    assert agree(inventories, [OLD]).generation == OLD
    assert agree(inventories, [NEW, OLD]).generation == NEW
    assert agree(inventories, [Generation(8, 1), OLD]).generation == OLD, (
        "another lineage is another generation"
    )
    with pytest.raises(ValueError, match="wanted must name at least one generation"):
        agree(inventories, [])


def test_a_copy_is_read_by_whose_file_it_is_where_several_find_it():
    """Ranks 2 and 3 are on one machine and see the same memory."""
    copies = [ShardLocation(rank, NEW, MEMORY, 2 + rank) for rank in (0, 1)]
    own = [ShardLocation(rank, NEW, MEMORY, rank) for rank in (2, 3)]
    plan = agree(listings([], [], copies + own, copies + own), [NEW])
    assert [source.reader for source in plan.sources] == [2, 3, 2, 3]


def test_a_rank_that_moved_finds_its_state_in_files_that_others_held():
    found = [ShardLocation(0, NEW, DISK, 3), ShardLocation(1, NEW, DISK, 0)]
    plan = agree(listings([ShardLocation(1, NEW, MEMORY, 1)], found), [NEW])
    assert plan.sources == (Source(1, DISK, 3), Source(1, DISK, 0))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"world_size": 4}, "it is of world size 4, this job is of 2"),
        ({"mesh": "shard=2"}, "it is of mesh 'shard=2', this job is of 'replica=2'"),
        ({"job": "other"}, "it is of job 'other', this job is of 'job'"),
    ],
)
def test_state_of_another_job_mesh_or_world_size_is_diagnosed(changed: dict, words: str):
    fields = {**identity(0, 8).to_json(), **changed, "generation": NEW}
    stranger = FoundShard(type(identity(0, 8))(**fields), 0, DISK, Path("/d/file"))
    inventories = [Listing.of(Inventory((stranger,)), MEMBER, [NEW, OLD]), Listing(frozenset())]
    with pytest.raises(CheckpointError) as raised:
        agree(inventories, [NEW, OLD])
    assert f"rank 0 finds /d/file: {words}" in str(raised.value)
    assert "step 8 cannot be had" in str(raised.value)
    # What is this job's own is taken all the same.
    whole = listings(of_both(0, (DISK, 0)), of_both(1, (DISK, 1)))
    assert agree([Listing(whole[0].copies, inventories[0].strangers), whole[1]], [NEW]).generation == NEW


def test_a_listing_survives_its_way_to_the_others():
    listing = Listing(frozenset(of_both(1, (MEMORY, 0), (DISK, 1))), ("a: of another job",))
    assert Listing.from_json(json.loads(json.dumps(listing.to_json()))) == listing
    with pytest.raises(ValueError, match="not a copy"):
        Listing.from_json({"copies": [[0, 1, 0, 2, 0]], "strangers": []})


def test_an_inventory_finds_what_two_folders_hold(tmp_path: Path):
    own, old = seal(tmp_path / "m", 0, 8), seal(tmp_path / "d", 0, 6)
    copy = path_of(tmp_path / "m", identity(1, 8), 0)
    copy.write_bytes(seal(tmp_path / "other", 1, 8).read_bytes())
    stock = inventory(tmp_path / "m", tmp_path / "d")
    assert {(each.path, each.tier, each.holder, each.identity.rank) for each in stock.found} == {
        (own, MEMORY, 0, 0),
        (copy, MEMORY, 0, 1),
        (old, DISK, 0, 0),
    }
    assert stock.problems == ()
    assert [each.path for each in inventory(tmp_path / "m", tmp_path / "d", [OLD]).found] == [old]
    assert [each.path for each in inventory(tmp_path / "m", tmp_path / "d", None, {(NEW, 1)}).found] == [copy]
    assert inventory(tmp_path / "none", tmp_path / "nor") == Inventory(())


def test_files_that_are_no_shards_or_have_another_ones_name_are_told_and_not_counted(tmp_path: Path):
    path = seal(tmp_path, 0, 8)
    path.with_name("rank-1-of-2.held-by-0.shard").write_bytes(path.read_bytes())
    path.with_name("rank-0-of-2.held-by-1.shard").write_bytes(path.read_bytes()[:100])
    path.with_name("rank-0-of-2.held-by-x.shard").write_bytes(b"")
    path.with_name("note").write_bytes(b"")
    stock = inventory(tmp_path, tmp_path / "none")
    assert [each.path for each in stock.found] == [path]
    first, second = stock.problems
    assert "held-by-1.shard: the header" in first
    assert "rank-1-of-2.held-by-0.shard holds the state of rank 0 at step 8" in second
