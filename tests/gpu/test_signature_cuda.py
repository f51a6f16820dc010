"""On a CUDA device: the fused fold equals the torch fold there and on the host, in little memory."""

from __future__ import annotations

import pytest
import torch

from tests.support import not_finite
from torchscout.c3.fold import fold_with_torch
from torchscout.c3.signature import (
    Algorithm,
    PendingSignatures,
    SignaturePlan,
    read_signatures,
    signature,
    signatures,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
SIGNED = [torch.int64, torch.int32, torch.int16, torch.int8]
UNSIGNED = [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
DTYPES = [*FLOATS, *SIGNED, *UNSIGNED, torch.bool, torch.complex64, torch.complex128]
SIZES = [0, 1, 7, 511, 512, 513, 4096, (1 << 20) + 3]
GIB = 1 << 30


def random_bytes(count: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda", generator=generator)


def fused_fold(tensor: torch.Tensor) -> int:
    from torchscout.c3.fold_triton import fold_with_triton

    return int(fold_with_triton([tensor]).item())


def assert_folds_everywhere_alike(tensor: torch.Tensor) -> None:
    assert fused_fold(tensor) == int(fold_with_torch(tensor).item())
    assert signature(tensor) == signature(tensor.cpu(), algorithm=Algorithm.FOLD)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_fold_equals_the_torch_fold(dtype, size):
    assert_folds_everywhere_alike(random_bytes(size * dtype.itemsize).view(dtype))


@pytest.mark.parametrize("count", [3, 4, 700])
def test_many_tensors_are_signed_as_each_by_itself(count):
    """With one launch for all of them, where they are many and aligned; kept tables do not grow stale."""
    for seed in range(2):
        many = [random_bytes((place * 7919 + seed) % 300_001).view(-1) for place in range(count)]
        odd = [each[1:] if each.numel() else each for each in many]
        for tensors in (many, odd, [*many, odd[1]], many):
            assert signatures(tensors) == [signature(each.cpu(), algorithm="fold") for each in tensors]
        many[2][0] ^= 1
        assert signatures(many) == [signature(each.cpu(), algorithm="fold") for each in many]


def test_signatures_are_of_the_bytes_at_the_time_they_were_begun():
    tensors = [random_bytes(5000 + size) for size in range(5)]
    expected = signatures(tensors)
    pending = [PendingSignatures(tensors[:2]), PendingSignatures(tensors[2:])]
    for each in tensors:
        each.zero_()
    first, second = read_signatures(pending)
    assert first + second == expected


@pytest.mark.parametrize("offset", range(17))
@pytest.mark.parametrize("size", [1, 6, 8, 4093, 1 << 20, (1 << 20) + 5])
def test_every_alignment_and_tail(offset, size):
    assert_folds_everywhere_alike(random_bytes(size + 16)[offset : offset + size])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_read_in_logical_order(dtype):
    cube = random_bytes(60 * dtype.itemsize).view(dtype).view(3, 4, 5)
    for view in (cube.permute(2, 0, 1), cube[1, 2, 3], cube[:1].expand(4, 4, 5)):
        host = cube.cpu().as_strided(view.shape, view.stride(), view.storage_offset())
        assert signature(view) == signature(host, algorithm="fold")
        assert fused_fold(view) == int(fold_with_torch(view).item())


def test_conjugate_and_negative_views():
    values = random_bytes(7 * 8).view(torch.complex64)
    conjugate, host = values.conj(), values.cpu().conj()
    assert conjugate.is_conj()
    assert signature(conjugate) == signature(host, algorithm="fold")
    assert conjugate.imag.is_neg()
    assert signature(conjugate.imag) == signature(host.imag, algorithm="fold")


def test_every_bit_flip_changes_the_signature():
    memory = random_bytes(4099)
    seen = {signature(memory)}
    for offset in [*range(8), *range(2041, 2049), 4095, 4096, 4098]:
        for bit in range(8):
            memory[offset] ^= 1 << bit
            seen.add(signature(memory))
            memory[offset] ^= 1 << bit
    assert len(seen) == 1 + 8 * 19


def test_every_launch_gives_the_same_fold():
    from torchscout.c3.fold_triton import Launch, fold_with_triton

    data = random_bytes((1 << 22) + 37)[1:]
    launches = [Launch(256, 1, 1), Launch(1024, 4, 8), Launch(2048, 8, 4), Launch(8192, 16, 1)]
    folds = {int(fold_with_triton([data], launch).item()) for launch in launches}
    assert folds == {int(fold_with_torch(data).item())}


def test_runs_repeat_exactly():
    data = random_bytes(64 << 20)
    assert len({signature(data) for _ in range(50)}) == 1


def test_the_input_is_left_alone():
    parameter = torch.nn.Parameter(torch.randn(33, 65, device="cuda"))
    before, version = parameter.detach().clone(), parameter._version
    signatures([parameter, parameter.t()])
    assert torch.equal(parameter, before)
    assert parameter._version == version


def test_several_tensors_in_one_call_keep_their_order():
    tensors = [random_bytes(size)[size % 3 :] for size in (5, 100, 0, 4096, 1 << 20)]
    mixed = [*tensors, torch.arange(9.0), tensors[0]]
    assert signatures(mixed) == [signature(tensor) for tensor in mixed]
    assert signatures(tensors) == signatures([tensor.cpu() for tensor in tensors], algorithm="fold")


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes at the same offset from an aligned address, in the same layout."""
    if not tensor.numel():
        return tensor.cuda()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def looked_at(tensors: list[torch.Tensor]) -> list[int]:
    """The positions of what is not finite; flags change no signature."""
    started = SignaturePlan(tensors).start(finite=True)
    assert started.read() == signatures(tensors)
    return started.not_finite


def test_nan_and_infinity_are_found_beside_the_signatures():
    named = [(name, on_cuda(tensor.detach()), is_wrong) for name, tensor, is_wrong in not_finite.cases()]
    found = looked_at([tensor for _, tensor, _ in named])
    assert [named[place][0] for place in found] == [name for name, _, is_wrong in named if is_wrong]
    assert [bool(looked_at([tensor])) for _, tensor, _ in named] == [is_wrong for *_, is_wrong in named]
    on_host = torch.tensor([float("nan")])
    mixed = [named[0][1], on_host, *(tensor for _, tensor, _ in named)]
    assert looked_at(mixed) == [1, *(2 + place for place in found)]


@pytest.mark.parametrize("dtype", not_finite.FIELDS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 3])
def test_one_element_that_is_not_finite_is_found_in_every_chunk(dtype, start):
    """Also at the borders of blocks and chunks, of 16 and 256 KiB, in a tensor with part of a last word."""
    block, chunk = (1 << 14) // dtype.itemsize, (1 << 18) // dtype.itemsize
    memory = torch.full((3 * chunk + block + 7,), torch.finfo(dtype).max, dtype=dtype, device="cuda")
    tensor, others = memory[start:], [random_bytes(100), torch.ones(5, device="cuda")]
    assert looked_at([*others, tensor]) == []
    last = tensor.numel() - 1
    for place in (0, 1, block - 1, block, chunk - 1, chunk, 2 * chunk + 5, 3 * chunk, last - 7, last):
        tensor[place] = float("-inf")
        assert looked_at([*others, tensor]) == [2], place
        tensor[place] = torch.finfo(dtype).tiny
    assert looked_at([*others, tensor]) == []


def test_of_random_words_the_kernel_flags_what_torch_does():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = [not_finite.random_tensor(generator, 70_000).cuda() for _ in range(7)]
        expected = [place for place, each in enumerate(drawn) if not each.isfinite().all()]
        assert looked_at(drawn) == expected


def test_under_a_mebibyte_of_device_memory():
    large = random_bytes(256 << 20)
    many = list(random_bytes(1 << 20).split(1 << 10))
    for tensors in ([large], [large[3:-2]], many):
        signatures(tensors)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        signatures(tensors)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
        assert torch.cuda.memory_allocated() == before


def test_the_current_stream_is_used():
    data = random_bytes(64 << 20)
    expected = signature(data)
    data.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        data.copy_(random_bytes(64 << 20))  # not there yet for whoever looks from another stream
        assert signature(data) == expected


def test_streams_do_not_disturb_each_other():
    from torchscout.c3.fold_triton import fold_with_triton

    data = [random_bytes(32 << 20), random_bytes((32 << 20) + 8)]
    expected = [int(fold_with_torch(each).item()) for each in data]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    folds = []
    for _ in range(50):  # queued on both at once, nobody waits in between
        for stream, each in zip(streams, data, strict=True):
            with torch.cuda.stream(stream):
                folds.append(fold_with_triton([each]))
    torch.cuda.synchronize()
    assert [int(fold.item()) for fold in folds] == expected * 50


@pytest.mark.parametrize("size", [2 * GIB + 8195, 16 * GIB + 8 * 4099 + 3])
def test_sizes_beyond_32_bits(size):
    """The second has more than 2**31 words."""
    if torch.cuda.mem_get_info()[0] < size + GIB:
        pytest.skip(f"needs {size / GIB:.0f} GiB of free device memory")
    data = torch.empty(size, dtype=torch.uint8, device="cuda")
    data[: size // 8 * 8].view(torch.int64).random_(generator=torch.Generator("cuda").manual_seed(0))
    data[size // 8 * 8 :] = 7
    before = fused_fold(data)
    assert before == int(fold_with_torch(data).item())
    for offset in (size // 2, size - 9, size - 1):
        data[offset] ^= 0x80
        assert fused_fold(data) != before
        data[offset] ^= 0x80
    assert fused_fold(data) == before


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    data = random_bytes(4099)
    assert signatures([data.to("cuda:1"), data]) == [signature(data)] * 2
    assert torch.cuda.current_device() == 0


def test_xxh3_of_device_memory_is_refused():
    with pytest.raises(ValueError, match=r"xxh3 reads host memory, got .* on cuda:0; use fold"):
        signature(random_bytes(8), algorithm="xxh3")
