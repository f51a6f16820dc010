"""Replays everything there is, without a training step: before new workers train on (paper, section 8).

Every recipe and every target, one after the other, on the calls that were kept when they were last replayed.
What comes of it for a checkpoint is for ``checkpoint.selection`` to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchscout.replay.guard import attempt
from torchscout.replay.recipe import Given, Peers, Recipe
from torchscout.replay.replayer import Begun, Findings, Replayer
from torchscout.replay.schedule import Due

__all__ = ["sweep"]

_Calls = Mapping[int, Mapping[str, Any]]
"""Of one target, the calls that peers have kept, by position."""


def sweep(replayer: Replayer, recipes: Sequence[Recipe], job: Peers, step: int) -> Findings:
    """What was found, the same on all peers; every rank of the job calls this between two steps."""
    findings = Findings()
    swept = [recipe for recipe in recipes if recipe.is_swept]
    # A stage of a pipeline has fewer layers than another, and must be there for the others' votes.
    counts = job.highest([len(recipe.targets) for recipe in swept])
    for recipe, count in zip(swept, counts, strict=True):
        calls = _kept(replayer, recipe, count)
        torn = _torn(recipe, calls, job)
        for target, found in enumerate(calls):
            begun = _begun(replayer, recipe, target, found)
            if target in torn:
                begun.problem = "groups of peers have kept it from different sources"
            replayer.check_besides(begun, step, findings)
    return findings


def _kept(replayer: Replayer, recipe: Recipe, count: int) -> list[_Calls]:
    """What peers have, for each target; nothing where this rank has no such target."""
    own = {}
    for target in range(len(recipe.targets)):
        if (kept := replayer.saved_calls[recipe.kind, recipe.kept_as(target)]) is not None:
            own[target] = kept.call
    gathered = replayer.peers_for(recipe).metadata.gather(json.dumps(own).encode())
    told = [json.loads(each) for each in gathered]
    return [
        {position: each[str(target)] for position, each in enumerate(told) if str(target) in each}
        for target in range(count)
    ]


def _torn(recipe: Recipe, calls: Sequence[_Calls], job: Peers) -> set[int]:
    """Targets of which groups of peers that compute together have kept calls of different sources.

    A tensor-parallel group would then compute on the inputs of two replicas. Whoever computes together has
    the same targets; stages of a pipeline need not have.
    """
    names, sources = list(recipe.targets), [min(found, default=None) for found in calls]
    alike = [each[1] for each in job.exchange([names, sources]) if each[0] == names]
    return {
        target
        for target, column in enumerate(zip(*alike, strict=True))
        if len({source for source in column if source is not None}) > 1
    }


def _begun(replayer: Replayer, recipe: Recipe, target: int, calls: _Calls) -> Begun:
    peers = replayer.peers_for(recipe)
    if target >= len(recipe.targets):
        return Begun(Due(recipe.kind, None), "", recipe, peers, 0, None, None)
    source = min(calls, default=0)
    own = replayer.saved_calls[recipe.kind, recipe.kept_as(target)]
    is_source = peers.position == source
    tensors = own.tensors if own is not None and is_source else None
    given = Given(is_source, calls.get(source), tensors)
    replay, problem = attempt(lambda: recipe.again(target, given))
    return Begun(Due(recipe.kind, target), recipe.targets[target], recipe, peers, source, replay, problem)
