"""A signature changes with every bit of a tensor, and with nothing else."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.support import not_finite
from torchscout.c3.fold import MULTIPLIER, SALT, dense, fold_with_torch
from torchscout.c3.signature import (
    Algorithm,
    LastPlan,
    PendingSignatures,
    SignaturePlan,
    read_signatures,
    signature,
    signatures,
)

BOTH = pytest.mark.parametrize("algorithm", list(Algorithm))
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
SIGNED = [torch.int64, torch.int32, torch.int16, torch.int8]
UNSIGNED = [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
DTYPES = [*FLOATS, *SIGNED, *UNSIGNED, torch.bool, torch.complex64, torch.complex128]
SIZES = [1, 7, 511, 512, 513, 4096]
MODULUS = 1 << 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small folds: threads would cost more than they help on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def places(elements: int, itemsize: int) -> list[int]:
    """Byte offsets: all of a small tensor, else the first, the last and two random elements."""
    chosen = random.Random(elements)
    some = {0, elements - 1, chosen.randrange(elements), chosen.randrange(elements)}
    picked = range(elements) if elements <= 7 else sorted(some)
    return [element * itemsize + byte for element in picked for byte in range(itemsize)]


def assert_every_flip_shows(
    tensor: torch.Tensor, memory: torch.Tensor, offsets: list[int], algorithm: Algorithm
) -> None:
    """Flip each bit of the bytes at ``offsets`` of ``memory``, alone, and look at ``tensor``."""
    before = signature(tensor, algorithm=algorithm)
    seen = {before}
    for offset in offsets:
        for bit in range(8):
            memory[offset] ^= 1 << bit
            seen.add(signature(tensor, algorithm=algorithm))
            memory[offset] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(offsets)
    assert signature(tensor, algorithm=algorithm) == before


def reference_fold(data: bytes) -> int:
    """The fold as its note defines it, one word after the other."""
    total = 0
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * index : 8 * index + 8], "little")
        total += reference_avalanche((word + (index + 1) * SALT) % MODULUS)
    return total % MODULUS


def reference_avalanche(word: int) -> int:
    word ^= word >> 32
    word = word * MULTIPLIER % MODULUS
    word ^= word >> 32
    word = word * MULTIPLIER % MODULUS
    return word ^ (word >> 32)


@pytest.mark.slow_cases("*-torch.complex*", "*-torch.*64-fold", "513-*", "*-torch.uint32-fold")
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_flip_changes_the_signature(dtype, size, algorithm):
    memory = random_bytes(size * dtype.itemsize, seed=size)
    assert_every_flip_shows(memory.view(dtype), memory, places(size, dtype.itemsize), algorithm)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "zero_dimensional", "unaligned"])
def test_every_bit_flip_shows_in_views(layout, dtype, algorithm):
    memory = random_bytes(48 * dtype.itemsize)
    flat = memory.view(dtype)
    views = {
        "transposed": flat.view(6, 8).t(),
        "strided": flat.view(6, 8)[:, ::8],
        "expanded": flat[:1].expand(5, 3),
        "zero_dimensional": flat[0],
        "unaligned": flat[1:],
    }
    first = dtype.itemsize if layout == "unaligned" else 0
    assert_every_flip_shows(
        views[layout], memory, [first + byte for byte in range(dtype.itemsize)], algorithm
    )


@BOTH
def test_pending_conjugation_and_negation_are_done_first(algorithm):
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert signature(values.conj(), algorithm=algorithm) == signature(
        torch.tensor([1 - 2j, 3 + 4j]), algorithm=algorithm
    )
    negative = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert negative.is_contiguous()
    assert signature(negative, algorithm=algorithm) == signature(
        torch.tensor([-1.0, 2.0]), algorithm=algorithm
    )


@BOTH
@pytest.mark.parametrize(("dtype", "extra"), [(torch.float32, 0), (torch.uint8, 3)])
def test_every_bit_position_shows_in_a_mebibyte(dtype, extra, algorithm):
    memory = random_bytes((1 << 20) + extra)
    offsets = [*range(8), *range(555_552, 555_560), len(memory) - 1]
    assert_every_flip_shows(memory.view(dtype), memory, offsets, algorithm)


@BOTH
def test_every_bit_flip_shows_in_the_local_shard_of_a_dtensor(one_rank, algorithm):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    memory = random_bytes(6 * 4)
    local = memory.view(torch.float32).view(2, 3)
    sharded = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert signature(sharded, algorithm=algorithm) == signature(local, algorithm=algorithm)
    parameter = torch.nn.Parameter(sharded)
    assert signature(parameter, algorithm=algorithm) == signature(local, algorithm=algorithm)
    assert_every_flip_shows(sharded, memory, places(6, 4), algorithm)


def test_a_pending_collective_is_waited_for(one_rank):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    reduced = all_reduce(torch.arange(5.0), "sum", dist.group.WORLD)
    assert isinstance(reduced, AsyncCollectiveTensor)
    assert signature(reduced) == signature(torch.arange(5.0))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@BOTH
def test_changes_of_several_elements_show(algorithm):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    swapped = x.clone()
    swapped[[3, 500]] = x[[500, 3]]
    ones = torch.ones(1000)
    hot = torch.eye(8)
    zeros = torch.zeros(6)
    two_zeros_negated = torch.tensor([-0.0, 0, -0.0, 0, 0, 0])
    distinct = [x, -x, x.flip(0), x.roll(1), swapped, ones, -ones, zeros.new_zeros(1000)]
    assert len(set(signatures(distinct, algorithm=algorithm))) == len(distinct)
    distinct = [*hot.unbind(), *(-hot).unbind()]
    assert len(set(signatures(distinct, algorithm=algorithm))) == len(distinct)
    distinct = [zeros, -zeros, two_zeros_negated, two_zeros_negated.flip(0)]
    assert len(set(signatures(distinct, algorithm=algorithm))) == len(distinct)


@BOTH
def test_paired_flips_of_any_bit_do_not_cancel(algorithm):
    words = torch.zeros(64, dtype=torch.int64)
    seen = {signature(words, algorithm=algorithm)}
    for bit in range(64):
        flip = (1 << bit) - (MODULUS if bit == 63 else 0)
        for pair in ([0, 1], [0, 32], [62, 63]):
            changed = words.clone()
            changed[pair] ^= flip
            seen.add(signature(changed, algorithm=algorithm))
    assert len(seen) == 1 + 64 * 3


@BOTH
def test_dtype_shape_and_length_count(algorithm):
    zeros = torch.zeros(96, dtype=torch.uint8)
    same_bytes = [zeros.view(dtype) for dtype in DTYPES]
    same_bytes += [zeros.view(shape) for shape in [(1, 96), (96, 1), (8, 12), (12, 8), (2, 48, 1)]]
    lengths = [zeros[:count] for count in range(20)]
    empty = [torch.empty(0), torch.empty(0, 3), torch.empty(3, 0), torch.empty(0, dtype=torch.int32)]
    scalars = [torch.zeros(()), torch.zeros(1), torch.zeros(1, 1)]
    distinct = [*same_bytes, *lengths, *empty, *scalars]
    assert len(set(signatures(distinct, algorithm=algorithm))) == len(distinct)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_read_in_logical_order(dtype, algorithm):
    def chosen(cube: torch.Tensor) -> torch.Tensor:
        return cube.view(3, 4, 5).permute(2, 0, 1)[1:, :, ::3]

    elements = random_bytes(60 * dtype.itemsize).view(60, dtype.itemsize)
    view = chosen(elements.view(dtype))
    gathered = elements[chosen(torch.arange(60)).flatten()].view(dtype).view(view.shape)
    assert not view.is_contiguous()
    assert signature(view, algorithm=algorithm) == signature(gathered, algorithm=algorithm)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_input_is_left_alone(dtype, algorithm):
    memory = random_bytes(97 * dtype.itemsize)
    tensor = memory.view(dtype)[1:]
    bytes_before, version = memory.clone(), tensor._version
    signatures([tensor, tensor.view(8, 12).t(), tensor[:1].expand(3)], algorithm=algorithm)
    assert torch.equal(memory, bytes_before)
    assert tensor._version == version


def test_contiguous_memory_is_not_copied_and_has_no_gradient():
    tensor = torch.randn(4, 6)
    assert dense(tensor).data_ptr() == tensor.data_ptr()
    assert dense(tensor[1:]).data_ptr() == tensor[1].data_ptr()
    assert not dense(torch.nn.Parameter(tensor).t()).requires_grad


def test_a_subclass_without_memory_of_its_own_is_a_plain_tensor():
    class Guarded(torch.Tensor):
        def view(self, *shape):
            raise NotImplementedError("not with this class")

    tensor = torch.randn(4, 6)
    assert signature(tensor.as_subclass(Guarded)) == signature(tensor)


@BOTH
def test_signatures_keep_order_and_fit_int64(algorithm):
    tensors = [torch.full((count,), float(count)) for count in range(40)]
    together = signatures(iter(tensors), algorithm=algorithm)
    assert together == [signature(tensor, algorithm=algorithm) for tensor in tensors]
    assert torch.tensor(together, dtype=torch.int64).tolist() == together
    assert min(together) < 0 < max(together)
    assert signatures([]) == []


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4099, (1 << 21) + 13])
def test_the_fold_is_what_its_note_says(size):
    data = random_bytes(size)
    assert fold_with_torch(data).item() % MODULUS == reference_fold(data.numpy().tobytes())


def test_the_format_is_pinned():
    """Signatures of stored state must not change with a release."""
    tensors = [
        torch.empty(0),
        torch.tensor(1.5, dtype=torch.float64),
        torch.arange(1000, dtype=torch.int64),
        torch.arange(7, dtype=torch.uint8),
        torch.arange(33).to(torch.bfloat16).view(3, 11),
    ]
    assert signatures(tensors, algorithm="fold") == [
        2359223078608801867,
        458797962973919214,
        -6311708723102757324,
        6094616205242319963,
        1005670430820594028,
    ]
    assert signatures(tensors, algorithm="xxh3") == [
        8332274929906965603,
        7147703397195805226,
        5996239272261781095,
        7583220908696273428,
        -6179105386780541985,
    ]


def freed() -> torch.Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(5)


@pytest.mark.filterwarnings("ignore:.*(prototype|deprecated)")
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: torch.ones(2, 3, device="meta"), r"meta tensor .*float32 of shape \(2, 3\) on meta"),
        (lambda: torch.ones(2, 3).to_sparse(), r"plain numbers, got torch.sparse_coo .*values"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"float32 of ragged shape"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"plain numbers, .*qint8"),
        (freed, r"storage was freed, got .*\(5,\).*gathered"),
        (fake, r"FakeTensor keeps its bytes in other tensors"),
        (lambda: [1.0, 2.0], r"needs a tensor, got list"),
    ],
)
def test_a_tensor_without_bytes_is_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        signature(make())


def test_host_memory_uses_xxh3_by_default_and_an_unknown_algorithm_is_refused():
    tensor = torch.arange(100)
    assert signature(tensor) == signature(tensor, algorithm="xxh3") != signature(tensor, algorithm="fold")
    with pytest.raises(ValueError, match="md5"):
        signature(tensor, algorithm="md5")


def test_plain_use_imports_neither_triton_nor_dtensor():
    code = """
import sys, torch
from torchscout.c3.signature import signature
signature(torch.ones(3)), signature(torch.nn.Parameter(torch.ones(3)), algorithm="fold")
print([name for name in ("triton", "torch.distributed.tensor") if name in sys.modules])
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


@pytest.mark.parametrize("algorithm", ["xxh3", "fold"])
def test_a_tensor_can_be_freed_and_resized_after_it_was_signed(algorithm: str):
    tensor = torch.arange(64.0)
    signature(tensor, algorithm=algorithm)
    tensor.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
    tensor.untyped_storage().resize_(256)


def test_pending_signatures_are_those_of_the_bytes_when_they_were_begun():
    """Also of several that are read together, and of both algorithms beside each other."""
    tensors = [torch.arange(size, dtype=torch.float32) for size in (0, 1, 5, 300)]
    for algorithm in Algorithm:
        expected = signatures(tensors, algorithm=algorithm)
        begun = [each.clone() for each in tensors]
        pending = [
            PendingSignatures(begun[:1], algorithm=algorithm),
            PendingSignatures(begun[1:], algorithm=algorithm),
            PendingSignatures(begun[3:]),
        ]
        for each in begun:
            each.zero_()
        first, second, third = read_signatures(pending)
        assert first + second == expected
        assert third == signatures(tensors[3:])


def test_a_plan_is_made_anew_only_when_a_tensor_has_moved():
    tensors, plans = [torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16)], LastPlan()
    first = plans.of(tensors)
    tensors[0] += 1
    assert plans.of(tensors) is first
    assert first.start().read() == signatures(tensors)
    tensors[0].data = torch.arange(7.0)
    again = plans.of(tensors)
    assert again is not first
    assert again.start().read() == signatures(tensors)


@BOTH
def test_nan_and_infinity_are_found_beside_the_signatures(algorithm):
    names, tensors, are_wrong = zip(*not_finite.cases(), strict=True)
    started = SignaturePlan(tensors, algorithm=algorithm).start(finite=True)
    assert started.read() == signatures(tensors, algorithm=algorithm)
    assert [names[place] for place in started.not_finite] == [
        name for name, is_wrong in zip(names, are_wrong, strict=True) if is_wrong
    ]
    unasked = SignaturePlan(tensors, algorithm=algorithm).start()
    unasked.read()
    assert unasked.not_finite == []


def test_what_is_found_is_of_the_bytes_when_signing_began():
    """Also of several that are read together, on the host and on devices."""
    tensors = [torch.tensor([1.0, float("nan")]), torch.ones(3), torch.tensor([float("inf")])]
    started = [SignaturePlan(tensors, algorithm=each).start(finite=True) for each in Algorithm]
    plain = PendingSignatures(tensors, algorithm="fold")
    for each in tensors:
        each.zero_()
    read_signatures([started[0], plain, started[1]])
    assert [each.not_finite for each in started] == [[0, 2], [0, 2]]


def test_tensors_that_could_not_be_looked_at_are_signed_and_not_taken_for_finite(monkeypatch):
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("for the largest element")

    monkeypatch.setattr(torch, "aminmax", out_of_memory)
    started = SignaturePlan([torch.ones(3)]).start(finite=True)
    assert started.read() == signatures([torch.ones(3)])
    with pytest.raises(RuntimeError, match="for the largest element"):
        _ = started.not_finite
