"""How TorchTitan's config spreads a model over ranks, and what the tests of it have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import LiveRanks
from tests.support.titan_jobs import Trial, make_assets
from torchscout.config import ObserverConfig
from torchscout.testing.local_ranks import preload

preload("tests.support.titan_jobs")

PATIENT = ObserverConfig(
    min_silence_seconds=2.0, silence_multiple=3.0, startup_seconds=120.0, grace_seconds=8.0
)
REPLICATE = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
HSDP = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
FULL = {"spmd_backend": "full_dtensor", **TENSOR}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PIPELINE_TENSOR = {**PIPELINE, **TENSOR}
EXPERT_TENSOR = {"expert_parallel_degree": 4, **TENSOR}
EXPERTS = "layers.1.moe.routed_experts.inner_experts"
_EXPERTS = EXPERTS.replace("layers.1", "layers.1._checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Layout:
    """A job, and what is known of its rank 2."""

    parallelism: Mapping[str, Any]
    found: tuple[str, tuple[int, ...]]
    """The scope and the ranks that are named when rank 2 is wrong or slow: of two peers both, since nothing
    says which is as it should be."""
    layer: str = "layers.1"
    """One that rank 2 computes, by the name of its module."""
    slowed: tuple[str, ...] = ("layers.0", "layers.1")
    """Some that it computes when there are four layers; there is a check of one in each step."""
    called: int = 1
    """How often training calls it in a step: activation checkpointing computes experts again in backward."""
    ranks: int = 4
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the trial, whatever the test says."""

    def trial(self, assets: Path, **changes: Any) -> Trial:
        return Trial(assets, self.parallelism, **{**changes, **self.more})


_RANK = ("rank", (2,))
_MIXTURE = {"is_mixture": True, "layers": 2}
LAYOUTS = {
    "replicate": Layout(REPLICATE, _RANK),
    "fsdp": Layout({}, _RANK),
    "hsdp": Layout(HSDP, _RANK),
    "tensor": Layout(TENSOR, ("peer_group", (0, 2))),
    "full_dtensor": Layout(FULL, ("peer_group", (0, 2))),
    "pipeline": Layout(PIPELINE, ("peer_group", (2, 3)), slowed=("layers.2", "layers.3")),
    "interleaved": Layout(
        INTERLEAVED, ("peer_group", (2, 3)), "0.layers.2", ("0.layers.1", "0.layers.2"), more={"layers": 4}
    ),
    "context": Layout(CONTEXT, ("peer_group", (0, 2))),
    "expert": Layout(EXPERT, ("peer_group", (0, 2)), _EXPERTS, (_EXPERTS,), 2, more=_MIXTURE),
    "pipeline, tensor": Layout(PIPELINE_TENSOR, ("peer_group", (0, 2)), "layers.0", ranks=8),
    "expert, tensor": Layout(EXPERT_TENSOR, ("peer_group", (2, 6)), _EXPERTS, (_EXPERTS,), 2, 8, _MIXTURE),
}


def layouts(*quick: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test of all layouts; what is not quick is slow."""
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(layout, id=name, marks=() if name in quick else pytest.mark.slow)
            for name, layout in LAYOUTS.items()
            if name not in but
        ],
    )


def live(request: pytest.FixtureRequest, layout: Layout) -> LiveRanks:
    """As many as it needs; those of a size stay for the whole module."""
    ranks: LiveRanks = request.getfixturevalue({4: "four", 8: "eight"}[layout.ranks])
    return ranks


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For modules to take over: a tokenizer and a text."""
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder
