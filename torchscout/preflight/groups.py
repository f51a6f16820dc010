"""The process groups over which a preflight communicates: the job, machines, rails and pairs.

Groups of one kind carry the same data, so that a slow one stands out among the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MOST_ROUNDS", "Link", "Links", "links_among"]

MOST_ROUNDS = 16
"""The most pairs of one rank."""

# Renamed in PyTorch 2.13, where the old name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Link:
    """Ranks that communicate with each other."""

    ranks: tuple[int, ...]
    """Ascending."""
    kind: str
    """``job``, ``machine``, ``rail`` or ``pair``."""

    @property
    def name(self) -> str:
        return f"{self.kind} {'-'.join(map(str, self.ranks))}" if self.kind == "pair" else self.kind


def links_among(hosts: Sequence[str]) -> list[list[Link]]:
    """Return all links in rounds, in each of which a rank has at most one; ``hosts`` has each rank's machine.

    A rail has the ranks with the same place on each machine. Pairs are those of the first ``MOST_ROUNDS``
    rounds of a tournament, so that a rank has few in a large job; in a small one these are all pairs.
    """
    on_host, rails = defaultdict[str, list[int]](list), defaultdict[int, list[int]](list)
    for rank, host in enumerate(hosts):
        rails[len(on_host[host])].append(rank)
        on_host[host].append(rank)
    rounds: list[tuple[str, Sequence[Sequence[int]]]] = [
        ("job", [range(len(hosts))]),
        ("machine", [*on_host.values()]),
        ("rail", [*rails.values()]),
        *(("pair", pairs) for pairs in islice(_tournament(len(hosts)), MOST_ROUNDS)),
    ]
    known: set[tuple[int, ...]] = set()
    found: list[list[Link]] = []
    for kind, groups in rounds:
        every = (tuple(sorted(group)) for group in groups)
        new = [Link(ranks, kind) for ranks in every if len(ranks) > 1 and ranks not in known]
        known |= {link.ranks for link in new}
        found.append(new)
    return found


def _tournament(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs; all together they are all pairs, each once."""
    others = size - 1 + size % 2
    for total in range(others):
        pairs = [(rank, (total - rank) % others) for rank in range(others)]
        # The rank that meets itself meets the last one instead, if their number is even.
        pairs = [(rank, others) if rank == other else (rank, other) for rank, other in pairs]
        yield [pair for pair in pairs if pair[0] < pair[1] < size]


class Links:
    """This rank's process groups. All ranks use theirs in the same order, so that none waits in a circle."""

    def __init__(self, hosts: Sequence[str], device: torch.device) -> None:
        self._device, rounds = device, links_among(hosts)
        self.every = [link for links in rounds for link in links]
        rank, world = dist.get_rank(), dist.group.WORLD
        self._groups = dict.fromkeys(rounds[0], world)
        for links in rounds[1:]:
            own = next((link for link in links if rank in link.ranks), None)
            # PyTorch names a group by its ranks and by how many groups there are, which must be equally many
            # on all members. So a rank without a link makes a group of its own.
            group = dist.new_group(
                [rank] if own is None else [*own.ranks],
                use_local_synchronization=True,
                group_desc="alone" if own is None else own.name,
            )
            if own is not None:
                self._groups[own] = group

    def use(self) -> None:
        """Use every group once, with little data, so that checks send scratch data over all of them."""
        for link, group in self._groups.items():
            size = len(link.ranks)
            sent = torch.ones(size, device=self._device)
            received = torch.empty(size, device=self._device)
            dist.all_reduce(sent, group=group)
            _all_gather(received, sent[:1], group=group)
            dist.all_to_all_single(received, sent, group=group)

    def is_over(self, has_ended: bool) -> bool:
        """Return rank 0's answer on every rank."""
        answer = torch.tensor([float(has_ended and dist.get_rank() == 0)], device=self._device)
        dist.all_reduce(answer)
        return bool(answer.item())
