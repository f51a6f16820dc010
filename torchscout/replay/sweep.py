"""Replays everything without a training step, before restarted workers continue training (paper, section 8).

Every target of every recipe is replayed, on the call that was saved when it was last replayed. Of experts
that are alike, each is replayed at least once, and so is each shape. Small targets are replayed together,
because ranks wait for each other as often for several as for one.
``checkpoint.gate`` decides from the results whether a checkpoint is used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchscout.replay.active import ActiveReplay
from torchscout.replay.guard import attempt
from torchscout.replay.recipe import SWEPT_TOGETHER, Peers, Recipe, SavedInput
from torchscout.replay.replayer import Replayer
from torchscout.replay.schedule import Due
from torchscout.replay.verdicts import Findings

__all__ = ["rounds", "sweep"]

_Calls = Mapping[int, Mapping[str, Any]]
"""The calls of one target that peers have saved, by position."""


def sweep(replayer: Replayer, recipes: Sequence[Recipe], job: Peers, step: int) -> Findings:
    """Return the results, identical on all peers. Every rank of the job calls this between two steps."""
    findings = Findings()
    swept = [recipe for recipe in recipes if recipe.is_swept]
    # Pipeline stages have different numbers of layers, and every rank must take part in every vote.
    counts = job.highest([len(recipe.swept()) for recipe in swept])
    for recipe, count in zip(swept, counts, strict=True):
        calls = _saved_calls(replayer, recipe, count)
        mixed, sizes = _agreed(replayer, recipe, calls, job)
        for places in rounds(sizes):
            together = {place: _begin(replayer, recipe, place, calls[place]) for place in places}
            for place in mixed & together.keys():
                together[place].problem = "peer groups have saved its call from different sources"
            replayer.check_now(together.values(), step, findings)
    return findings


def _saved_calls(replayer: Replayer, recipe: Recipe, count: int) -> list[_Calls]:
    """Return the calls that peers have saved, for each swept target; none if this rank has no such target."""
    own = {}
    for place, target in enumerate(recipe.swept()):
        if (saved := replayer.saved_calls.of((recipe.kind, recipe.saved_name(target)))) is not None:
            own[place] = saved.call
    gathered = replayer.peers_for(recipe).metadata.gather(json.dumps(own).encode())
    by_position = [json.loads(each) for each in gathered]
    return [
        {position: each[str(place)] for position, each in enumerate(by_position) if str(place) in each}
        for place in range(count)
    ]


def _agreed(
    replayer: Replayer, recipe: Recipe, calls: Sequence[_Calls], job: Peers
) -> tuple[set[int], list[int]]:
    """Return the places of targets whose calls peer groups that compute together saved from several sources,
    and how much memory each place needs at most on any rank.

    A tensor-parallel group would otherwise compute on the inputs of two replicas. Ranks that compute together
    have the same targets; stages of a pipeline do not.
    """
    names = [recipe.targets[target] for target in recipe.swept()]
    sources = [min(found, default=None) for found in calls]
    own = [_bytes_of(replayer, recipe, target) for target in recipe.swept()]
    answers = job.exchange([names, sources, own])
    alike = [each[1] for each in answers if each[0] == names]
    mixed = {
        place
        for place, column in enumerate(zip(*alike, strict=True))
        if len({source for source in column if source is not None}) > 1
    }
    columns = itertools.zip_longest(*(each[2] for each in answers), fillvalue=0)
    return mixed, [max(column) for column in columns]


def _bytes_of(replayer: Replayer, recipe: Recipe, target: int) -> int:
    saved = replayer.saved_calls.of((recipe.kind, recipe.saved_name(target)))
    return recipe.swept_bytes(target) + (0 if saved is None else saved.nbytes)


def rounds(sizes: Sequence[int]) -> Iterator[range]:
    """Divide the places of targets of these sizes into rounds. Those of one round are replayed together."""
    first, needed = 0, 0
    for place, size in enumerate(sizes):
        needed += size
        if needed > SWEPT_TOGETHER and place > first:
            yield range(first, place)
            first, needed = place, size
    if sizes:
        yield range(first, len(sizes))


def _begin(replayer: Replayer, recipe: Recipe, place: int, calls: _Calls) -> ActiveReplay:
    peers, targets = replayer.peers_for(recipe), recipe.swept()
    if place >= len(targets):
        return ActiveReplay(Due(recipe.kind, None), "", recipe, peers, 0, None, None)
    target = targets[place]
    source = min(calls, default=0)
    own = replayer.saved_calls.of((recipe.kind, recipe.saved_name(target)))
    is_source = peers.position == source
    tensors = own.tensors if own is not None and is_source else None
    saved = SavedInput(is_source, calls.get(source), tensors)
    replay, problem = attempt(lambda: recipe.replay_saved(target, saved))
    due, name = Due(recipe.kind, target), recipe.targets[target]
    return ActiveReplay(due, name, recipe, peers, source, replay, problem)
