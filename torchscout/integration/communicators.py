"""The process groups that SCOUT owns, and job-wide steps that fail everywhere or nowhere (paper, section 9).

Training's own groups are never used: what SCOUT says must not come between what training says.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch.distributed as dist

from torchscout.decision.channel import ProcessGroupChannel
from torchscout.errors import ScoutError
from torchscout.mesh import Axis, PeerGroup

__all__ = ["Communicators"]

_TIMEOUT = datetime.timedelta(seconds=120)


class Communicators:
    """SCOUT's own groups of this rank. Every rank makes one at the same point, and closes it there."""

    def __init__(self) -> None:
        # Gloo whatever training uses: what is exchanged lives in host memory.
        self._group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=_TIMEOUT, group_desc="torchscout"
        )
        everybody = PeerGroup(tuple(range(dist.get_world_size())), Axis.REPLICA)
        self._job = ProcessGroupChannel(everybody, self._group)

    @property
    def names(self) -> list[str]:
        """As the interceptor of collectives sees them."""
        return [self._group.group_name]

    def exchange(self, document: Any) -> list[Any]:
        """Every rank's document, by rank. JSON: what a rank sends is data, not code."""
        return [json.loads(each) for each in self._job.gather(json.dumps(document).encode())]

    def together(self, problem: str | None) -> None:
        """Fail on every rank if a step failed on any, and say what happened where."""
        problems = self.exchange(problem)
        if told := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]:
            raise ScoutError(f"{len(told)} of {len(problems)} ranks failed\n" + "\n".join(told))

    def close(self) -> None:
        dist.destroy_process_group(self._group)
