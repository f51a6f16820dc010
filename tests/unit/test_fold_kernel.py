"""The Triton kernel folds as torch does, bit for bit, however it is launched.

Triton decides at import whether its interpreter runs the kernel, so this file runs itself once in a
process of its own, on host memory, and the tests read what that process printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]

LAUNCHES = [(16, 1, 1, 1), (16, 4, 2, 3), (64, 2, 1, 5), (256, 4, 4, 2), (1024, 8, 1, 132)]
"""Words of a block, warps, programs for each multiprocessor, multiprocessors."""
SIZES = [0, 1, 7, 8, 9, 15, 16, 127, 128, 129, 511, 512, 513, 2047, 2048, 2055, 4096, 4099]
"""Bytes: around words, around blocks, and with every kind of tail."""
OFFSETS = [0, 1, 2, 4, 8]
"""From an address that is a multiple of 16."""
CHUNKS = [(128, 16), (512, 16), (1024, 64), (1 << 18, 64)]
"""Bytes of a chunk, and words of a block."""
DTYPES = ["float64", "float32", "bfloat16", "float8_e5m2", "bool", "complex128"]


def run_cases() -> dict[str, dict[str, list[int]]]:
    """Kernel and torch side by side for every case."""
    import torch

    from torchscout.c3.fold import fold_with_torch
    from torchscout.c3.fold_triton import LAUNCH, FoldKernel, Launch, chunks_of

    def both(data: torch.Tensor, launch: Launch, processors: int) -> list[int]:
        result, scratch = torch.full((3,), 5), torch.tensor([5, 0, 0, 5])
        kernel = FoldKernel(launch, processors)
        for _ in range(2):  # the first call must leave the scratch as the second needs it
            result[1] = 5
            kernel.fold(result[1:].data_ptr(), scratch[1:].data_ptr(), data.data_ptr(), data.nbytes)
            assert scratch.tolist() == [5, 0, 0, 5]
        assert result[0] == result[2] == 5
        return [int(result[1]), int(fold_with_torch(data))]

    generator = torch.Generator().manual_seed(0)
    aligned = torch.randint(0, 256, (1 << 15,), dtype=torch.uint8, generator=generator)
    aligned = aligned[-aligned.data_ptr() % 16 :]
    cases: dict[str, dict[str, list[int]]] = {"alignment": {}, "launch": {}, "dtype": {}, "chunks": {}}
    for size in SIZES:
        for offset in OFFSETS:
            data = aligned[offset : offset + size]
            cases["alignment"][f"{size}+{offset}"] = both(data, Launch(64, 4, 2), 2)
    for launch in LAUNCHES:
        for size in (40, 8192, 8192 + 133):
            cases["launch"][f"{launch}/{size}"] = both(aligned[:size], Launch(*launch[:3]), launch[3])
    for name in DTYPES:
        data = aligned[: 24 * 50].view(getattr(torch, name))[1:]
        cases["dtype"][name] = both(data, LAUNCH, 1)
    for chunk, block in CHUNKS:
        many = [aligned[16 * place : 16 * place + size] for place, size in enumerate(SIZES)]
        folds = torch.zeros(len(many), dtype=torch.int64)
        table = chunks_of([(each.data_ptr(), each.nbytes) for each in many], chunk)
        FoldKernel(Launch(block, 4, 1), 1).fold_chunks(folds.data_ptr(), table.data_ptr(), len(table))
        for size, fold, each in zip(SIZES, folds.tolist(), many, strict=True):
            cases["chunks"][f"{chunk}/{size}"] = [fold, int(fold_with_torch(each))]
    return cases


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, list[int]]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
def test_every_size_and_alignment_folds_as_in_torch(interpreted):
    cases = interpreted["alignment"]
    assert len(cases) == len(SIZES) * len(OFFSETS)
    assert {name: kernel for name, (kernel, _) in cases.items()} == {
        name: in_torch for name, (_, in_torch) in cases.items()
    }
    assert len({kernel for kernel, _ in cases.values()}) == len(cases) - (
        len(OFFSETS) - 1
    )  # nothing folds to 0


def test_every_dtype_folds_as_in_torch(interpreted):
    cases = interpreted["dtype"]
    assert list(cases) == DTYPES
    assert all(kernel == in_torch for kernel, in_torch in cases.values()), cases


@pytest.mark.parametrize("size", [40, 8192, 8192 + 133])
def test_the_launch_does_not_change_the_fold(interpreted, size):
    folds = [interpreted["launch"][f"{launch}/{size}"] for launch in LAUNCHES]
    assert {kernel for kernel, _ in folds} == {folds[0][1]}


def test_many_tensors_in_one_launch_fold_as_each_by_itself(interpreted):
    cases = interpreted["chunks"]
    assert len(cases) == len(CHUNKS) * len(SIZES)
    assert all(kernel == in_torch for kernel, in_torch in cases.values()), cases


if __name__ == "__main__":
    print(json.dumps(run_cases()))
