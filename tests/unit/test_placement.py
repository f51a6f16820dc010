"""Which rank holds whose copy, over every small layout and many large ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from math import ceil

import pytest

from torchscout.checkpoint.replication.placement import copies_beside, held_ranks, replica_holders


def layouts() -> Iterator[list[str]]:
    """Every way to put up to six ranks on up to four hosts, then larger ones at random."""
    for size in range(1, 7):
        yield from (list(hosts) for hosts in product("abcd", repeat=size))
    chance = random.Random(3)
    for _ in range(300):
        names = [f"host-{number}" for number in range(chance.randint(1, 12))]
        yield chance.choices(names, weights=[chance.random() ** 3 for _ in names], k=chance.randint(7, 90))


def test_every_copy_is_on_another_host_if_there_is_one():
    for hosts in layouts():
        found = replica_holders(hosts)
        assert sorted(found) == list(range(len(hosts)))
        for rank, holder in found.items():
            if len(set(hosts)) == 1:
                assert holder is None
            else:
                assert holder is not None
                assert hosts[holder] != hosts[rank], hosts


def test_nobody_holds_more_copies_than_somebody_must():
    """Whatever the choice, a host's ranks must be shared out among those outside it."""
    for hosts in layouts():
        if len(set(hosts)) == 1:
            continue
        needed = max(ceil(count / (len(hosts) - count)) for count in Counter(hosts).values())
        assert max(Counter(replica_holders(hosts).values()).values()) == needed, hosts


def lost_with(hosts: list[str], failed: set[str]) -> list[int]:
    """The ranks whose state is gone if these machines fail."""
    holders = replica_holders(hosts)
    return [
        rank
        for rank, holder in holders.items()
        if holder is not None and {hosts[rank], hosts[holder]} <= failed
    ]


@pytest.mark.parametrize("machines", range(2, 18))
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_half_as_many_pairs_of_machines_are_fatal_as_in_a_ring(machines: int, ranks: int):
    hosts = [f"host-{number}" for number in range(machines) for _ in range(ranks)]
    pairs = list(combinations(sorted(set(hosts)), 2))
    fatal = [pair for pair in pairs if lost_with(hosts, set(pair))]
    odd = machines % 2
    assert len(fatal) == (machines - 3 * odd) // 2 + 3 * odd  # one group of three if the number is odd
    assert len(fatal) <= (1 if machines == 2 else machines), "a ring has as many as it has machines"
    assert not any(lost_with(hosts, {host}) for host in hosts), "one machine alone is never fatal"


@pytest.mark.parametrize(
    ("hosts", "links"),
    [
        ("aabb", "ab ba"),
        ("aabbcc", "ab bc ca"),
        ("aabbccdd", "ab ba cd dc"),
        ("aabbccddeee", "ea eb ae be ab cd dc"),  # e alone has no partner
        ("aaaabbbbccd", "ab ba bc bd ca da"),
    ],
)
def test_machines_without_a_partner_of_equal_size_form_one_group(hosts: str, links: str):
    found = {
        hosts[rank] + hosts[holder] for rank, holder in replica_holders(hosts).items() if holder is not None
    }
    assert found == set(links.split())


def test_placement_is_independent_of_host_names_and_of_the_asking_rank():
    for hosts in layouts():
        renamed = [f"{hash(host)}" for host in hosts]
        assert replica_holders(hosts) == replica_holders(tuple(renamed))


def test_wards_are_the_other_side_of_holders():
    for hosts in layouts():
        found = replica_holders(hosts)
        for rank in range(len(hosts)):
            assert held_ranks(hosts, rank) == tuple(ward for ward in sorted(found) if found[ward] == rank)


def test_one_large_host_and_one_rank_elsewhere():
    assert replica_holders(["a", "a", "a", "b"]) == {0: 3, 1: 3, 2: 3, 3: 0}
    assert replica_holders([]) == {}


@pytest.mark.parametrize(
    ("hosts", "copies"),
    [
        ("a", [3]),
        ("aa", [6, 6]),
        ("ab", [7, 7]),  # three of its own, four of the other's
        ("aab", [10, 10, 11]),  # b holds for both
    ],
)
def test_a_machine_must_have_room_for_its_ranks_and_for_what_they_hold(hosts: str, copies: list[int]):
    assert [copies_beside(hosts, rank, replicate=True) for rank in range(len(hosts))] == copies
    alone = [3 * hosts.count(host) for host in hosts]
    assert [copies_beside(hosts, rank, replicate=False) for rank in range(len(hosts))] == alone
