"""What the shards of several ranks are together, and what they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.reshard.whole_state import WholeState, describe, public_name
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, encode
from torchscout.errors import CheckpointError
from torchscout.state.collect import StateParts, collect
from torchscout.state.layout import bytes_of, name_of


def whole(folder: Path, *ranks: StateParts) -> WholeState:
    """The state that these ranks have saved."""
    headers = []
    for rank, parts in enumerate(ranks):
        identity = ShardIdentity(
            job="job", mesh="mesh", world_size=len(ranks), rank=rank, generation=Generation(1)
        )
        state = collect(parts)
        blobs = [
            Blob(name, name_of(each.dtype), tuple(each.shape), bytes(bytes_of(each.detach().contiguous())))
            for name, each in state.tensors.items()
        ]
        path = shards.path_of(folder, identity, rank)
        shards.write(path, encode(identity, TrustLevel.LATEST, state.document, blobs))
        headers.append(shards.inspect(path))
    return describe(headers)


def parts(value: float = 1.0, size: int = 3, owned: dict[str, torch.Tensor] | None = None) -> StateParts:
    model = nn.Linear(size, 2)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    return StateParts(model, [torch.optim.AdamW(model.parameters())], {}, owned or {})


def test_replicas_are_one_tensor_with_two_places(tmp_path: Path):
    state = whole(tmp_path, parts(), parts())
    weight = state.named("parameters")["weight"]
    assert [[each.rank for each in copies] for copies in weight.distinct()] == [[0, 1]]
    assert state.groups == {(0, 0): ["weight", "bias"]}


def test_a_plain_tensor_that_differs_between_ranks_is_refused(tmp_path: Path):
    """Megatron's tensor-parallel weights are such tensors."""
    with pytest.raises(CheckpointError, match=r"'weight' is a plain tensor that differs .* 0 and 1.*Meg"):
        whole(tmp_path, parts(1.0), parts(2.0))


def test_a_plain_tensor_of_another_shape_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"'weight' is float32 of shape \(2, 4\) on rank 1.*Megatron"):
        whole(tmp_path, parts(size=3), parts(size=4))


def test_flat_buffers_of_a_framework_are_refused(tmp_path: Path):
    """DeepSpeed's ZeRO keeps such tensors."""
    with pytest.raises(CheckpointError, match=r"rank 0 holds 'flat' in a form of its .*DeepSpeed"):
        whole(tmp_path, parts(owned={"flat": torch.ones(4)}))


def test_names_are_those_of_the_model_without_wrappers():
    wrappers = ["module", "module.layers.0._orig_mod"]
    assert public_name("module.layers.0._orig_mod.module.weight", wrappers) == "layers.0.module.weight"
    assert public_name("module.weight", []) == "module.weight"


def test_tied_parameters_and_buffers_that_differ(tmp_path: Path):
    class Tied(nn.Module):
        def __init__(self, seen: float) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            nn.init.ones_(self.first.weight)
            self.second.weight = self.first.weight
            self.register_buffer("seen", torch.full((2,), seen))

    state = whole(tmp_path, StateParts(Tied(1.0)), StateParts(Tied(2.0)))
    assert state.tied == {"second.weight": "first.weight"}
    assert state.notes == ["buffer 'seen' differs between ranks; rank 0's is used"]
    assert [each.rank for each in state.named("buffers")["seen"].stored] == [0]
