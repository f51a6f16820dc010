"""Other people's training loops over NCCL: silent, bitwise, certified; a flipped bit is found."""

from __future__ import annotations

import pytest

from tests.clients import rows

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(6)]
NAMES = (
    "nanogpt",
    "nanogpt-bf16",
    "nanogpt-fp16",
    "nanogpt-compiled",
    "nanogpt-accumulation",
    "activation-offload",
    "checkpointing",
    "checkpointing-reentrant",
    "custom-function",
    "lora",
    "lstm",
    "muon-gathering",
    "sharded-by-hand",
    "zero-redundancy",
    "torch-muon",
    "adafactor",
    "resnet",
    "resnet-local-statistics",
    "ema-by-hand",
    "gan",
    "fsdp2",
    "hsdp",
    "tensor-parallel",
)


@pytest.mark.parametrize("row", ["healthy", "flipped"])
@pytest.mark.parametrize("name", NAMES)
def test_a_client_on_cuda_devices(name: str, row: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "BACKEND", "nccl")
    result = rows.run(row, name)
    assert result.ok, f"{result.words}\n{result.details}"
