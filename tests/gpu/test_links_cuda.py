"""Replay's connections over NCCL, as far as one device goes: a group of one, and tensors where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchscout.communicators import Communicators
from torchscout.mesh import Axis, PeerGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def test_tensors_and_evidence_travel_over_nccl_and_metadata_over_gloo(nccl: None):
    communicators = Communicators()
    links = communicators.links(PeerGroup((0,), Axis.REPLICA), torch.device("cuda", 0))
    assert links._device_group is not None
    assert links._device_group.name() == "nccl"
    assert {each.name() for each in links._groups} <= {"gloo"}
    for device in ("cuda", "cpu"):
        tensor = torch.arange(100, dtype=torch.uint8, device=device)
        links.broadcast(tensor, source=0)
        assert tensor.tolist() == list(range(100))
    assert links.evidence.gather(b"x" * 9000) == [b"x" * 9000]
    assert links.metadata.gather(b"seen") == [b"seen"]
    assert links.highest([3, 0]) == [3, 0]
    communicators.close()
