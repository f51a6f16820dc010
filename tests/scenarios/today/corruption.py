"""Runs the checks of ``test_corruption`` through today's driver: its ranks are threads, and a recipe in place
of a layer's replay returns the values that a row gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tests.scenarios.rows import Finding
from tests.scenarios.today.thread_ranks import UNTIMED, Links, Rank, on_every_rank
from torchscout.config import ReplayConfig
from torchscout.decision.types import Action, Incident
from torchscout.mesh import Mesh
from torchscout.replay.recipe import ABSENT, Comparison, Mode, Observation, Recipe, Replay, SavedInput
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.state.table import StateTable

if TYPE_CHECKING:
    from tests.scenarios.test_corruption import Check, Job, Value, Values

ACTIONS = {Action.REPLACE: "replace", Action.PREFLIGHT: "preflight"}
ABOUT = {
    "the state itself differs": "state",
    "not all peers received the same input": "input",
    "only the computation differs": "computation",
}
"""What an incident's sentence says."""
FAILED, NOTHING = "failed", "nothing"


def reports(job: Job) -> list[tuple[Finding, str]]:
    """Return what is reported in all checks of the job, in order, each with what it is about."""
    replicas = job.ranks // (job.tensor * job.stages)
    mesh = Mesh.grid(replica=replicas, tensor=job.tensor, pipeline=job.stages, hosts=job.machines)
    first, *others = on_every_rank(mesh, lambda links: _reports(links, mesh, job))
    assert all(each == first for each in others), "every rank knows of every incident"
    return first


def finding_of(incident: Incident) -> Finding:
    scope, action = incident.scope.value.replace("_", " "), ACTIONS[incident.action]
    return Finding(incident.manifestation.value, incident.ranks, scope, action)


def _reports(links: Links, mesh: Mesh, job: Job) -> list[tuple[Finding, str]]:
    state, layers = _State(job, links.rank), _Layers(job, links.rank)
    config = ReplayConfig(interval=1, recipes=("layer", "replicated_state"), variants=job.scales, **UNTIMED)
    recipes = [ReplicatedStateRecipe(state.table.view()), layers]
    rank = Rank(links, mesh, recipes, config, table=state.table)
    for step, check in enumerate(job.checks, start=1):
        state.show(check.state)
        layers.check = check
        rank.driver.step_finished(step)
    rank.driver.close()
    assert rank.boundary.failures == []
    return [(finding_of(each), _about(each)) for each in rank.corruption]


def _about(incident: Incident) -> str:
    return next((about for words, about in ABOUT.items() if words in incident.sentence), "")


class _State:
    """The state of one rank: a tensor with one number for each name that some check mentions."""

    def __init__(self, job: Job, rank: int) -> None:
        self._rank = rank
        self._mentioned = {
            "layer.0/weight",
            "layer.1/weight",
            *job.before,
            *(name for each in job.checks for name in each.state),
        }
        self._held: dict[str, torch.Tensor] = {}
        self.show(job.before)
        self.table = StateTable(self._held)

    def show(self, values: Mapping[str, Values]) -> None:
        """Hold these values from now on."""
        found = {name: values[name][self._rank] if name in values else 0 for name in self._mentioned}
        kept = {name: each for name, each in found.items() if each != NOTHING}
        self._held.clear()
        self._held |= {name: torch.tensor([each], dtype=torch.float64) for name, each in kept.items()}


class _Layers(Recipe):
    """Layers that are replayed in turn."""

    kind, varies = "layer", True

    def __init__(self, job: Job, rank: int) -> None:
        self.targets = [f"layer.{number}" for number in range(job.layers)]
        self.check: Check = job.checks[0]
        self.rank = rank

    def new_replay(self, target: int, _: bool, __: SavedInput | None, /) -> Replay:
        return _Layer(self, self.targets[target])


class _Layer(Replay):
    def __init__(self, recipe: _Layers, name: str) -> None:
        self._recipe, self._name = recipe, name
        self._passes = Counter[float]()
        """How often it was replayed in this check, by the scale of its input."""

    def describe(self) -> Any:
        return self._name

    def comparisons(self) -> list[Comparison]:
        given = f"{self._name}/input"
        return [
            Comparison(given, Mode.INPUT),
            Comparison(f"{self._name}/output", Mode.FORWARD, (given,)),
            Comparison(f"{self._name}/grad_input", Mode.BACKWARD, (given,)),
        ]

    def observe(self, seen: Observation) -> None:
        scale, check = seen.variant, self._recipe.check
        number = self._passes[scale]
        self._passes[scale] += 1
        output = check.output if scale == 1 else check.scaled.get(scale)
        columns = (check.input, output, check.gradient if scale == 1 else None)
        for comparison, values in zip(self.comparisons(), columns, strict=True):
            value = self._value(values, number, usual=int(1e9 * scale))
            if value == FAILED:
                raise RuntimeError("no memory")
            seen.signatures[comparison.surface] = ABSENT if value == NOTHING else int(value)

    def _value(self, values: Values | None, number: int, usual: int) -> Value:
        if values is None:
            return usual
        every: Sequence[Value] = values(number) if callable(values) else values
        return every[self._recipe.rank]
