"""The Triton kernel folds as torch does, bit for bit, however it is launched.

Triton decides at import whether its interpreter runs the kernel, so this file runs itself once in a
process of its own, on host memory, and the tests read what that process printed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import not_finite
from torchscout.c3.fold import EXPONENTS, dense, fold_with_torch, not_finite_with_torch

if TYPE_CHECKING:
    from torchscout.c3.fold_triton import Launch

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
BLOCK_PLACES = [0, 1023, 1024, 2047, 2048, 4095, 4096, 4132]
"""Elements of four bytes, in a tensor of three chunks of two blocks, whose words are joined, and a part."""
DTYPES = ["float64", "float32", "bfloat16", "float8_e5m2", "bool", "complex128"]


def run_cases() -> dict[str, dict[str, list[int]]]:
    """Kernel and torch side by side for every case."""
    from torchscout.c3.fold_triton import LAUNCH, Launch

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
        for odd in (0, 3):
            starts = [16 * place + place * odd for place in range(len(SIZES))]
            many = [aligned[start : start + size] for start, size in zip(starts, SIZES, strict=True)]
            folds, flags = in_chunks(many, chunk, block, flags=False)
            assert not any(flags)
            for size, fold, each in zip(SIZES, folds, many, strict=True):
                cases["chunks"][f"{chunk}/{size}/{odd}"] = [fold, int(fold_with_torch(each))]
    return cases | flag_cases()


def both(data: torch.Tensor, launch: Launch, processors: int) -> list[int]:
    """The fold of the kernel for one tensor, and that in torch."""
    from torchscout.c3.fold_triton import FoldKernel

    result, scratch = torch.full((3,), 5), torch.tensor([5, 0, 0, 5])
    kernel = FoldKernel(launch, processors)
    for _ in range(2):  # the first call must leave the scratch as the second needs it
        result[1] = 5
        kernel.fold(result[1:].data_ptr(), scratch[1:].data_ptr(), data.data_ptr(), data.nbytes)
        assert scratch.tolist() == [5, 0, 0, 5]
    assert result[0] == result[2] == 5
    return [int(result[1]), int(fold_with_torch(data))]


def in_chunks(tensors: list[torch.Tensor], chunk: int, block: int, *, flags: bool) -> list[list[int]]:
    """The folds, and then the flags if they are asked for."""
    from torchscout.c3.fold_triton import FoldKernel, Launch, chunks_of

    every = [dense(each) for each in tensors]
    places = [(each.data_ptr(), each.nbytes, EXPONENTS.get(each.dtype, 0)) for each in every]
    table, groups = chunks_of(places, chunk)
    found = torch.zeros(2, len(every), dtype=torch.int64)
    address = found[1].data_ptr() if flags else 0
    FoldKernel(Launch(block, 4, 1), 1).fold_chunks(found.data_ptr(), address, table.data_ptr(), groups)
    return found.tolist()


def flagged(named: dict[str, torch.Tensor], chunk: int, block: int) -> dict[str, list[int]]:
    """The fold with flags and in torch, the flag, and the flag in torch."""
    every = [*named.values()]
    folds, flags = in_chunks(every, chunk, block, flags=True)
    in_torch = [int(fold_with_torch(each)) for each in every]
    columns = zip(folds, in_torch, flags, not_finite_with_torch(every).tolist(), strict=True)
    return dict(zip(named, map(list, columns), strict=True))


def flag_cases() -> dict[str, dict[str, list[int]]]:
    """Folds with flags; see ``flagged``."""
    named = {name: tensor for name, tensor, _ in not_finite.cases()}
    cases = {"flags": flagged(named, chunk=128, block=16), "blocks": {}, "random": {}}
    for place in BLOCK_PLACES:
        large = torch.zeros(BLOCK_PLACES[-1] + 1)
        large[place] = -math.inf
        cases["blocks"] |= flagged({str(place): large}, chunk=1 << 13, block=512)
    generator = torch.Generator().manual_seed(0)
    for launch in range(5):
        drawn = {f"{launch}/{each}": not_finite.random_tensor(generator, 120) for each in range(30)}
        cases["random"] |= flagged(drawn, chunk=256, block=32)
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
    assert len(cases) == len(CHUNKS) * len(SIZES) * 2
    assert all(kernel == in_torch for kernel, in_torch in cases.values()), cases


@pytest.mark.parametrize("kind", ["flags", "blocks", "random"])
def test_flags_do_not_change_the_fold(interpreted, kind: str):
    assert interpreted[kind]
    assert all(kernel == in_torch for kernel, in_torch, *_ in interpreted[kind].values())


def test_nan_and_infinity_are_flagged_wherever_they_are(interpreted):
    flags = {name: bool(flag) for name, (*_, flag, _) in interpreted["flags"].items()}
    assert flags == {name: is_wrong for name, _, is_wrong in not_finite.cases()}
    assert {name: flag for name, (*_, flag, _) in interpreted["blocks"].items()} == dict.fromkeys(
        map(str, BLOCK_PLACES), 1
    )


def test_of_random_words_the_kernel_flags_what_torch_does(interpreted):
    flags = [(kernel, in_torch) for *_, kernel, in_torch in interpreted["random"].values()]
    assert all(kernel == in_torch for kernel, in_torch in flags)
    assert 20 < sum(kernel for kernel, _ in flags) < len(flags) - 20


if __name__ == "__main__":
    print(json.dumps(run_cases()))
