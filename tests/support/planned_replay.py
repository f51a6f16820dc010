"""Ranks as threads whose replays do what a test plans for them, and record every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.thread_peers import ThreadPeers, on_threads
from torchscout.decision.types import EvidenceRecord
from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.recipe import Comparison, Mode, Observation, Recipe, Replay, SavedInput
from torchscout.replay.replayer import Replayer
from torchscout.replay.schedule import Rotation
from torchscout.replay.verdicts import Findings
from torchscout.utils.reentrancy import in_own_work

Act = Callable[[int, str, float], Any]


class Planned(Recipe):
    """A recipe whose replays compare two numbers, and do at each call what the test plans for a rank.

    ``act(rank, call, variant)`` may raise; what it returns for ``observe`` is added to the output.
    """

    def __init__(
        self, rank: int, act: Act = lambda *_: None, *, kind: str = "layer", varies: bool = True
    ) -> None:
        self.rank, self.act, self.kind, self.varies = rank, act, kind, varies
        self.targets, self.is_swept = ("a", "b"), True
        self.calls: list[tuple[str, Any]] = []
        self.milliseconds: Callable[[], float] = lambda: 1.0
        """What the present run takes."""
        self.received: list[int] = []
        """The source's values, as they were when they were needed."""

    def say(self, call: str, detail: Any = None, variant: float = 1.0) -> Any:
        self.calls.append((call, detail))
        return self.act(self.rank, call, variant)

    def begin(self, target: int, *, is_source: bool) -> PlannedReplay:
        replay = PlannedReplay(self, self.targets[target])
        self.say("begin", (target, is_source))
        return replay

    def replay_saved(self, target: int, saved: SavedInput) -> PlannedReplay:
        replay = PlannedReplay(self, self.targets[target])
        self.say("replay_saved", (target, saved.is_source))
        return replay

    def call_names(self) -> list[str]:
        return [call for call, _ in self.calls]


class PlannedReplay(Replay):
    def __init__(self, recipe: Planned, target: str) -> None:
        self._recipe, self._target = recipe, target
        self._value = torch.tensor([recipe.rank + 10], dtype=torch.int64)

    def describe(self) -> Any:
        answer = self._recipe.say("describe", in_own_work())
        return {"rank": self._recipe.rank} if answer is None else answer

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        self._recipe.say("prepare", (descriptions, source))

    def align(self, broadcast: Broadcast) -> None:
        broadcast(self._value.view(torch.uint8))
        self._recipe.say("align")

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", (1,)

    def comparisons(self) -> list[Comparison]:
        self._recipe.say("comparisons")
        given = f"{self._target}/input"
        return [Comparison(given, Mode.INPUT), Comparison(f"{self._target}/output", Mode.FORWARD, (given,))]

    def observe(self, seen: Observation) -> None:
        variant = seen.variant
        seen.signatures[f"{self._target}/input"] = self._value.item()
        self._recipe.received.append(int(self._value.item()))
        seen.times["time/module"] = self._recipe.milliseconds()
        wrong = self._recipe.say("observe", variant, variant)
        seen.signatures[f"{self._target}/output"] = int(self._value.item() * variant * 100) + (wrong or 0)

    def release(self) -> None:
        self._recipe.say("release")


class Rank:
    """The recipes of one thread, which are due at every step, and the replayer that checks them."""

    def __init__(self, peers: ThreadPeers, recipes: Sequence[Recipe], variants: tuple[float, ...] = (1.0,)):
        kinds = {recipe.kind: len(recipe.targets) for recipe in recipes}
        self.peers, self.recipes, self.rank = peers, recipes, peers.rank
        self.rotation = Rotation(kinds, dict.fromkeys(kinds, 1))
        self.replayer = Replayer(recipes, self.rotation, lambda *_: peers)
        self.replayer.variants = variants

    def step(self, step: int = 1) -> Findings:
        self.replayer.begin(step)
        return self.replayer.check(step)


def job(act: Act = lambda *_: None, *groups: Sequence[int], **settings: Any) -> list[Rank]:
    every = ThreadPeers.create_all(*(groups or [(0, 1, 2)]))
    return [Rank(peers, [Planned(peers.rank, act)], **settings) for peers in every]


def checked(ranks: Sequence[Rank], steps: int = 1) -> list[Findings]:
    """Return the outcome of the last step on each rank."""
    by_peers = {rank.peers: rank for rank in ranks}

    def body(peers: ThreadPeers) -> Findings:
        outcomes = [by_peers[peers].step(step) for step in range(1, steps + 1)]
        return outcomes[-1]

    return on_threads([rank.peers for rank in ranks], body)


def fails(rank: int, call: str, error: Exception | None = None) -> Act:
    def act(here: int, what: str, _: float) -> None:
        if (here, what) == (rank, call):
            raise error or ReplayError("there is no room")

    return act


def statuses(records: Sequence[EvidenceRecord]) -> dict[str, str]:
    return {record.surface: record.status for record in records}


def named(records: Sequence[EvidenceRecord]) -> dict[tuple[str, str | None], tuple[int, ...]]:
    return {(record.surface, record.mode): record.ranks for record in records if record.ranks}
