"""One replay from the start of capturing to its release (paper, section 6.1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torchscout.decision.repeatability import REFUSED
from torchscout.decision.types import EvidenceRecord
from torchscout.replay.guard import Refusal, attempt
from torchscout.replay.recipe import Peers, Recipe, Replay
from torchscout.replay.schedule import Due
from torchscout.replay.verdicts import Context, not_checked

__all__ = ["ActiveReplay", "description_of", "unreplayed"]


@dataclass(slots=True)
class ActiveReplay:
    """A replay that is due at the end of this step."""

    due: Due
    target: str
    recipe: Recipe
    peers: Peers
    source: int
    """The position of the peer whose values are used."""
    replay: Replay | None
    problem: str | None
    """Why it cannot be replayed: on this rank or, after the vote, on any."""
    is_refused: bool = False
    """Whether the problem is permanent, such as an optimizer that communicates, and not a failure."""


def unreplayed(active: ActiveReplay, step: int) -> EvidenceRecord:
    """Return the record of a replay that not all ranks were ready for."""
    context = Context(step, active.peers.group.ranks, active.target)
    surface = "/".join(filter(None, (active.target, active.due.kind)))
    reason = f"{REFUSED}: {active.problem}" if active.is_refused else str(active.problem)
    return not_checked(context, surface, reason)


def description_of(active: ActiveReplay, inside: str | None) -> dict[str, Any]:
    """Return what peers must know about a replay. ``inside``: why there cannot be any here, or None."""
    document, replay = None, active.replay
    if replay is not None and active.problem is None:
        document, active.problem = attempt(lambda: json.dumps(replay.describe()))
        active.is_refused = isinstance(active.problem, Refusal)
    active.problem = active.problem or inside
    return {"problem": active.problem, "document": document}
