"""The parallelism of published training runs, and of any other job: ``8x16x128`` is TP 8, PP 16, DP 128."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchscout.mesh import AXES, Mesh

__all__ = ["PUBLISHED", "SMALL", "Layout", "drawn", "layout_of"]

SMALL = "small"
"""Draws another small job for each scenario."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are laid out: tensor parallelism varies fastest, then pipeline stages, then replicas.

    With ``stages_last``, replicas vary faster than stages, so that an expert group fills its machines.
    """

    name: str
    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    """Expert-parallel ranks, neighbours along data parallelism, or all ranks of a tensor group."""
    expert_in_tensor: bool = False
    """Whether experts are split over the ranks of a tensor group."""
    stages_last: bool = False
    per_host: int = 8
    """How many ranks a machine has."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.data, self.expert) < 1 or self.ranks < 2:
            raise ValueError(f"degrees must be at least 1, and ranks at least 2, got {self.degrees}")
        whole = self.tensor if self.expert_in_tensor else self.data
        if whole % self.expert:
            raise ValueError(f"{self.expert} expert-parallel ranks do not divide {whole}")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def between_stages(self) -> int:
        """How far apart the ranks of neighbouring stages are."""
        return self.tensor * self.data if self.stages_last else self.tensor

    @property
    def degrees(self) -> str:
        experts = f" EP{self.expert}" if self.expert > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline} DP{self.data}{experts}"

    def mesh(self) -> Mesh:
        rank, dense = np.arange(self.ranks), np.zeros((self.ranks, len(AXES)), dtype=np.int64)
        between_replicas = self.tensor if self.stages_last else self.tensor * self.pipeline
        dense[:, AXES.index("tensor")] = rank % self.tensor
        dense[:, AXES.index("pipeline")] = rank // self.between_stages % self.pipeline
        dense[:, AXES.index("replica")] = rank // between_replicas % self.data
        mesh = Mesh(dense, self.hosts(self.per_host))
        return mesh if self.expert == 1 or self.expert_in_tensor else mesh.carve_experts(self.expert)

    def hosts(self, per_host: int) -> list[str]:
        return [f"node-{rank // per_host}" for rank in range(self.ranks)]


PUBLISHED = {
    layout.name: layout
    for layout in (
        Layout("llama3-405b", tensor=8, pipeline=16, data=128),
        Layout("megascale", tensor=8, pipeline=8, data=192),
        Layout("megatron-1t", tensor=8, pipeline=64, data=6),
        Layout("megascale-moe", tensor=8, pipeline=15, data=12, expert=8, expert_in_tensor=True),
        Layout("deepseek-v3", tensor=1, pipeline=16, data=128, expert=64, stages_last=True),
    )
}
"""By name: 16,384, 12,288, 3,072, 1,440 and 2,048 ranks."""


def layout_of(text: str, ranks: int | None = None) -> Layout:
    """Return a published layout by its name, or read ``TPxPPxDP`` or ``TPxPPxDPxEP``.

    ``ranks`` changes the number of replicas. Raises ``ValueError`` for anything else.
    """
    layout = PUBLISHED.get(text)
    if layout is None:
        degrees = text.lower().split("x")
        if len(degrees) not in (3, 4) or not all(each.isdecimal() for each in degrees):
            known = ", ".join([SMALL, *PUBLISHED])
            raise ValueError(f"unknown layout {text!r}; give TPxPPxDP or TPxPPxDPxEP, or one of {known}")
        tensor, pipeline, data, *expert = map(int, degrees)
        layout = Layout(text, tensor, pipeline, data, expert[0] if expert else 1)
    replica = layout.tensor * layout.pipeline
    if ranks is not None and ranks % replica:
        raise ValueError(f"{ranks} ranks are not a multiple of {replica} ({layout.degrees})")
    return layout if ranks is None else replace(layout, data=ranks // replica)


def drawn(chance: np.random.Generator) -> Layout:
    """Return a job of 2 to 36 ranks, most of whose groups have two or three members."""
    tensor, pipeline, data = 1, 1, 1
    while not 2 <= tensor * pipeline * data <= 36:
        tensor, pipeline, data = chance.choice([1, 2, 3, 4], 3, p=[0.3, 0.3, 0.3, 0.1]).tolist()
    return Layout(SMALL, tensor, pipeline, data, per_host=int(chance.choice([1, 2, 4, 8])))
