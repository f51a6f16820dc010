"""Listeners see exactly the collectives that a job issues, whoever issues them.

The truth is PyTorch's Flight Recorder, which sits below us, in the backend. On Gloo it records no
point-to-point and no monitored barrier; there the truth is what the test itself called.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from tests.support.call_recorder import CallRecorder, RecordedCall
from tests.support.ranks import run_ranks
from torchscout.collectives.call import Splits, operators
from torchscout.collectives.interceptor import listen
from torchscout.testing.local_ranks import preload

preload("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")

RANKS = 4
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Job = Callable[[int], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 8), float(rank))).square().sum().backward()


def ddp(rank: int) -> None:
    step(nn.parallel.DistributedDataParallel(network()), rank)


def fsdp2(rank: int) -> None:
    sharded(init_device_mesh("cpu", (RANKS,)), rank)


def hsdp(rank: int) -> None:
    sharded(init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard")), rank)


def sharded(mesh: DeviceMesh, rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0], mesh=mesh)
    step(fully_shard(model, mesh=mesh), rank)


def tensor_parallel(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    step(parallelize_module(network(), init_device_mesh("cpu", (RANKS,)), plan), rank=0)


def functional_collectives(rank: int) -> None:
    world, tensor = dist.group.WORLD, torch.ones(8)
    c10d = torch.ops._c10d_functional
    results = [
        functional.all_reduce(tensor, "max", world),
        functional.all_to_all_single(tensor, None, None, world),
        functional.broadcast(tensor, 1, world),
        c10d.all_gather_into_tensor(tensor, RANKS, world.group_name),
        c10d.reduce_scatter_tensor(tensor, "sum", RANKS, world.group_name),
        *c10d.all_gather_into_tensor_coalesced([tensor, tensor], RANKS, world.group_name),
    ]
    for result in results:
        functional.wait_tensor(result)


def plain(rank: int) -> None:
    tensor = torch.ones(4)
    dist.broadcast(tensor, 1)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.reduce(tensor, 3)
    dist.gather(tensor, each() if rank == 2 else None, dst=2)
    dist.scatter(tensor, each() if rank == 1 else None, src=1)
    dist.all_gather(each(), tensor)
    dist.reduce_scatter(tensor, each())
    _all_gather(torch.empty(16), tensor)
    _reduce_scatter(tensor, torch.ones(16))


def each() -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(RANKS)]


def objects(rank: int) -> None:
    dist.all_gather_object([None] * RANKS, {"rank": rank})
    dist.broadcast_object_list([rank], src=1)
    dist.gather_object(rank, [None] * RANKS if rank == 0 else None)
    dist.scatter_object_list([None], list(range(RANKS)) if rank == 0 else None)


def coalesced(rank: int) -> None:
    for issue in (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: _all_gather(torch.empty(16), torch.ones(4)),
        lambda: _reduce_scatter(torch.empty(4), torch.ones(16)),
    ):
        with dist._coalescing_manager():
            issue()
            issue()


def barriers(rank: int) -> None:
    dist.barrier()
    dist.monitored_barrier()


def compiled(rank: int) -> None:
    def compute(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor, "sum", dist.group.WORLD)
        dist.all_reduce(tensor)  # rewritten to the functional one
        return total + tensor

    run = torch.compile(compute, backend="aot_eager")
    run(torch.ones(4))  # traced with fake tensors first, then issued
    run(torch.ones(4))


def another_thread(rank: int) -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)), name="another")
    thread.start()
    thread.join()


JOBS = [
    ddp,
    fsdp2,
    hsdp,
    tensor_parallel,
    functional_collectives,
    plain,
    objects,
    coalesced,
    barriers,
    compiled,
    another_thread,
]

Record = tuple[str, str, str, int]
"""What both know of an operation: group, its role, name, elements that this rank gives."""


def recorded() -> list[Record]:
    entries = pickle.loads(_dump_fr_trace(includeStackTraces=False)).get("entries", [])
    return [
        (
            *entry["process_group"],
            entry["profiling_name"].removeprefix("gloo:"),
            elements(entry["input_sizes"]),
        )
        for entry in entries
    ]


def as_recorded(call: RecordedCall) -> list[Record]:
    """What the backend makes of an operation we saw."""
    if call.variant == "monitored_barrier_":
        return []
    group = call.group.name, call.group.description
    if call.operation == "reduce_scatter":  # on Gloo an all-reduce of each tensor
        return [(*group, "all_reduce", elements([shape])) for shape in call.inputs]
    return [(*group, call.operation, elements(call.inputs))]


def elements(shapes: Any) -> int:
    return sum(math.prod(shape) for shape in shapes)


def watching(rank: int) -> dict[str, tuple[list[Record], list[RecordedCall], list[RecordedCall]]]:
    # Read at the first collective; PyTorch 2.10 reads it earlier, so set it for pytest there.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "5000"
    seen = {}
    for job in JOBS:
        recorder, start = CallRecorder(), len(recorded())
        with listen(recorder):
            job(rank)
        seen[job.__name__] = recorded()[start:], recorder.calls, recorder.tokens
    return seen


@pytest.fixture(scope="module")
def report() -> list[dict[str, tuple[list[Record], list[RecordedCall], list[RecordedCall]]]]:
    return run_ranks(watching, RANKS, timeout=120)


@pytest.mark.parametrize("job", JOBS)
def test_every_issued_operation_is_seen(report, job: Job):
    for rank in report:
        issued, calls, tokens = rank[job.__name__]
        assert [record for each in calls for record in as_recorded(each)] == issued
        assert issued, "the job communicates"
        assert tokens == calls


def test_nothing_but_real_operations_is_seen_of_a_barrier_and_of_compiled_code(report):
    for rank in report:
        assert [call.variant for call in rank["barriers"][1]] == ["barrier", "monitored_barrier_"]
        assert [call.variant for call in rank["compiled"][1]] == ["allreduce_"] * 4


def test_listeners_run_in_the_thread_that_issues(report):
    assert {call.thread for rank in report for call in rank["another_thread"][1]} == {"another"}


def test_groups_have_a_name_role_position_and_members(report):
    for number, rank in enumerate(report):
        groups = {call.group.description: call.group for call in rank["hsdp"][1]}
        assert set(groups) == {"mesh_replicate", "mesh_shard"}
        first = number // 2 * 2
        assert groups["mesh_shard"].members == (first, first + 1)
        assert (groups["mesh_shard"].rank, groups["mesh_shard"].size) == (number % 2, 2)
        assert groups["mesh_replicate"].members == (number % 2, number % 2 + 2)


def point_to_point(rank: int) -> list[RecordedCall]:
    recorder, pair = CallRecorder(), dist.new_group([2, 3])
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    with listen(recorder):
        works = [dist.isend(torch.ones(2), right, tag=5), dist.irecv(torch.ones(2), left, tag=5)]
        batch = [dist.P2POp(dist.irecv, torch.ones(3), left), dist.P2POp(dist.isend, torch.ones(3), right)]
        for work in works + dist.batch_isend_irecv(batch):
            work.wait()
        if rank == 2:
            dist.send(torch.ones(1, dtype=torch.int64), 3, group=pair)
        elif rank == 3:
            dist.recv(torch.ones(1, dtype=torch.int64), group=pair)
    return recorder.calls


def test_point_to_point_is_seen_with_peer_and_tag():
    for rank, calls in enumerate(run_ranks(point_to_point, RANKS)):
        right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
        expected: list[tuple[Any, ...]] = [
            ("send", right, 5, ((2,),), ()),
            ("recv", left, 5, (), ((2,),)),
            ("recv", left, 0, (), ((3,),)),
            ("send", right, 0, ((3,),), ()),
        ]
        if rank == 2:
            expected.append(("send", 1, 0, ((1,),), ()))  # a place in the pair, not a global rank
        if rank == 3:
            expected.append(("recv", None, 0, (), ((1,),)))
        assert [(h.operation, h.peer, h.tag, h.inputs, h.outputs) for h in calls] == expected
        assert {h.dtype for h in calls[:4]} == {torch.float32}
        assert {h.is_async for h in calls} == {None}


def asking(rank: int) -> list[RecordedCall]:
    recorder, late, fake = CallRecorder(), dist.new_group([1, 2, 3]), dist.new_group(backend="fake")
    with listen(recorder):
        if rank > 0:
            dist.broadcast(torch.ones(2, 3), src=3, group=late)
            dist.reduce(torch.ones(2), dst=1, op=dist.ReduceOp.MIN, group=late)
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.BXOR, group=late)
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.AVG, group=late, async_op=True).wait()
        dist.scatter(torch.ones(4), each() if rank == 1 else None, src=1)
        sent, received = [rank + 1] * RANKS, [1, 2, 3, 4]
        dist.all_to_all_single(torch.empty(10, 3), torch.ones(sum(sent), 3), received, sent)
        dist.all_to_all_single(torch.empty(8), torch.ones(8))
        dist.all_to_all(each(), each(), group=fake)  # Gloo of PyTorch 2.10 has none
        dist.group.WORLD.allgather_coalesced(
            [[torch.ones(1), torch.ones(2)]] * RANKS, [torch.ones(1), torch.ones(2)]
        ).wait()
    return recorder.calls


def test_a_call_has_the_arguments_of_the_operation():
    for rank, calls in enumerate(run_ranks(asking, RANKS)):
        *reductions, scatter, uneven, even, lists, gather = calls
        if rank > 0:
            broadcast, reduce, bits, average = reductions
            assert (broadcast.root, broadcast.inputs, broadcast.reduction) == (2, ((2, 3),), None)
            assert (reduce.root, reduce.reduction, reduce.is_async) == (0, "min", False)
            assert (bits.reduction, bits.dtype, bits.root) == ("bxor", torch.int32, None)
            assert (average.reduction, average.is_async, average.splits) == ("avg", True, None)
        assert scatter.inputs == (((4,),) * 4 if rank == 1 else ())
        assert (scatter.outputs, scatter.dtype) == (((4,),), torch.float32)
        assert uneven.splits == Splits(sent=(3 * (rank + 1),) * RANKS, received=(3, 6, 9, 12))
        assert even.splits == Splits(sent=(2,) * RANKS, received=(2,) * RANKS)
        assert (gather.inputs, gather.outputs) == (((1,), (2,)), ((1,), (2,)) * RANKS)
        assert lists.splits == Splits(sent=(4,) * RANKS, received=(4,) * RANKS)


def test_every_operator_of_this_release_has_a_plain_name():
    assert {operator.operation for operator in operators()} == {
        *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce"),
        *("reduce_scatter", "scatter", "send"),
    }


def training(rank: int) -> list[tuple[str, bytes]]:
    return [(mode, trained(rank, mode)) for mode in ("alone", "watched", "alone again")]


def trained(rank: int, mode: str) -> bytes:
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    handle = listen(CallRecorder()) if mode == "watched" else None
    for number in range(5):
        step(model, rank + number)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def test_training_is_bitwise_the_same_with_a_listener():
    results = [parameters for rank in run_ranks(training, 2) for _, parameters in rank]
    untrained = b"".join(parameter.detach().numpy().tobytes() for parameter in network().parameters())
    assert len(results) == 6
    assert set(results) == {results[0]} != {untrained}
