"""Listeners can be added and removed at any moment without an effect on training."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from tests.support.call_recorder import CallRecorder
from tests.support.ranks import run_ranks
from torchscout.collectives.call import Call, operators
from torchscout.collectives.interceptor import Pending, listen, uninstall


def kernels() -> list[str]:
    """Everything that is registered for the operators, as the dispatcher prints it."""
    return [torch._C._dispatch_dump(operator.overload._schema.name) for operator in operators()]


def total() -> float:
    """An all-reduce of this rank's own, with its result."""
    tensor = torch.full((2,), 3.0)
    dist.all_reduce(tensor)
    return float(tensor.sum())


def coming_and_going(rank: int) -> None:
    untouched, recorder = kernels(), CallRecorder()
    handle = listen(recorder)
    assert kernels() != untouched
    assert total() == 6
    handle.remove()
    handle.remove()
    assert total() == 6
    assert recorder.operations == ["all_reduce"]
    with listen(recorder):
        uninstall()  # not while somebody listens
        assert total() == 6
    assert recorder.operations == ["all_reduce"] * 2
    uninstall()
    uninstall()
    assert kernels() == untouched
    assert total() == 6
    with listen(recorder):
        assert total() == 6
    assert recorder.operations == ["all_reduce"] * 3


def test_nothing_is_seen_after_the_last_listener_is_removed_and_listening_can_restart():
    run_ranks(coming_and_going, 1)


def leaving_in_any_order(rank: int) -> None:
    for order in itertools.permutations(range(3)):
        recorders = [CallRecorder() for _ in order]
        handles = [listen(each) for each in recorders]
        for left, leaving in enumerate(order):
            total()
            handles[leaving].remove()
            calls = [len(each.calls) for each in recorders]
            assert calls == [min(order.index(place), left) + 1 for place in range(3)]


def test_listeners_can_be_removed_in_any_order():
    run_ranks(leaving_in_any_order, 1)


class Leaver(CallRecorder):
    """Removes itself while it is called."""

    def before(self, call: Call) -> Any:
        self.handle.remove()
        return super().before(call)


def leaving_from_inside(rank: int) -> None:
    leaver = Leaver()
    leaver.handle = listen(leaver)
    assert total() == 6
    assert (len(leaver.calls), len(leaver.tokens)) == (1, 0)


def test_a_listener_may_remove_itself():
    run_ranks(leaving_from_inside, 1)


class Door(CallRecorder):
    """Holds a collective up until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()

    def before(self, call: Call) -> Any:
        self.reached.set()
        assert self.opened.wait(10)
        return super().before(call)


def removing_in_flight(rank: int) -> None:
    door, results = Door(), []
    handle = listen(door)
    thread = threading.Thread(target=lambda: results.append(total()))
    thread.start()
    assert door.reached.wait(10)
    handle.remove()
    assert total() == 6  # nobody holds this one up
    door.opened.set()
    thread.join()
    assert results == [6]
    assert (len(door.calls), len(door.tokens)) == (1, 0)


def test_a_listener_may_be_removed_while_a_collective_is_in_flight():
    run_ranks(removing_in_flight, 1)


def changing_under_load(rank: int) -> None:
    stop, errors, groups = threading.Event(), [], [dist.new_group([0]) for _ in range(3)]

    def work(group: dist.ProcessGroup) -> int:
        tensor, count = torch.ones(2), 0
        while not stop.is_set():
            dist.all_reduce(tensor, group=group)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, group) for group in groups]
        for _ in range(300):
            with listen(CallRecorder(), on_error=errors.append):
                time.sleep(0.0001)
        stop.set()
    assert all(worker.result() > 0 for worker in workers)
    assert not errors


def test_listeners_are_added_and_removed_while_other_threads_communicate():
    run_ranks(changing_under_load, 1)


class Clumsy(CallRecorder):
    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment = moment

    def before(self, call: Call) -> Any:
        token = super().before(call)
        if self.moment == "before":
            raise KeyError("dropped")
        return token

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        super().issued(call, token, pending)
        raise KeyError("dropped")


def failing(rank: int, moment: str) -> None:
    clumsy, careful, errors = Clumsy(moment), CallRecorder(), []
    with listen(clumsy, on_error=errors.append), listen(careful):
        assert total() == total() == 6
    assert [repr(error) for error in errors] == ["KeyError('dropped')"]
    assert (len(clumsy.calls), len(clumsy.tokens)) == (1, int(moment == "issued"))
    assert (len(careful.calls), len(careful.tokens)) == (2, 2)


@pytest.mark.parametrize("moment", ["before", "issued"])
def test_an_exception_in_a_listener_removes_only_that_listener(moment: str):
    run_ranks(failing, 1, moment)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def failing_unattended(rank: int) -> str:
    kept = Kept()
    logging.getLogger("torchscout").addHandler(kept)
    listen(Clumsy("before"))
    assert total() == 6
    (record,) = kept.records
    return f"{record.levelname} {record.getMessage()}"


def test_without_a_boundary_of_its_own_a_failure_is_logged():
    (line,) = run_ranks(failing_unattended, 1)
    assert line == "ERROR torchscout: a listener to collectives failed and was removed: KeyError: 'dropped'"


def refused(rank: int) -> tuple[int, int]:
    def message() -> str:
        options = dist.BroadcastOptions()
        options.rootRank = 5
        with pytest.raises(RuntimeError, match="invalid root rank: 5") as caught:
            dist.group.WORLD.broadcast([torch.ones(2)], options)
        return f"{type(caught.value)} {caught.value}"

    recorder, alone = CallRecorder(), message()
    with listen(recorder):
        assert message() == alone
    return len(recorder.calls), len(recorder.tokens)


def test_a_failing_operation_raises_the_same_error_as_without_listeners():
    assert run_ranks(refused, 1) == [(1, 0)]


class Talker(CallRecorder):
    """Communicates when it is called for communication."""

    def before(self, call: Call) -> Any:
        assert total() == 6
        return super().before(call)


def talking(rank: int) -> tuple[int, int]:
    talker, recorder, errors = Talker(), CallRecorder(), []
    with listen(talker, on_error=errors.append), listen(recorder):
        assert total() == 6
    assert not errors
    return len(talker.calls), len(recorder.calls)


def test_operations_issued_by_a_listener_are_not_seen():
    assert run_ranks(talking, 1) == [(1, 1)]


def tracing(rank: int) -> int:
    recorder = CallRecorder()
    with listen(recorder), FakeTensorMode(), suppress(UnsupportedOperatorException):  # by PyTorch 2.10
        dist.all_reduce(torch.ones(2))
    return len(recorder.calls)


def test_a_traced_collective_is_not_seen():
    assert run_ranks(tracing, 1) == [0]


def forking(rank: int) -> tuple[list[int], int]:
    group, recorder, own = (
        dist.new_group([0], backend="fake"),
        CallRecorder(),
        CallRecorder(),
    )  # it has no threads
    handle = listen(recorder)
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        dist.all_reduce(torch.ones(2), group=group)
        handle.remove()  # the parent's: nothing to do here
        with listen(own):
            dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(2), group=group)
        os.write(writable, bytes([len(recorder.calls), len(own.calls)]))
        os._exit(0)
    seen_by_child = list(os.read(readable, 2))
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(2), group=group)
    return seen_by_child, len(recorder.calls)


def test_a_forked_child_starts_without_listeners_and_may_have_its_own():
    assert run_ranks(forking, 1) == [([0, 1], 1)]


class Waiting(CallRecorder):
    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        super().issued(call, token, pending)
        self.call, self.pending = call, pending


def waiting(rank: int) -> list[bool]:
    listener = Waiting()
    memory = np.ones(4, dtype=np.float32)
    tensor, trace = torch.from_numpy(memory), weakref.ref(memory)
    del memory
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(tensor)
        return []
    with listen(listener):
        work = dist.all_reduce(tensor, async_op=True)
    pending = listener.pending
    states = [pending.is_completed()]
    dist.send(torch.ones(1), 1)
    work.wait()
    del tensor, work
    gc.collect()
    assert trace() is not None, "an operation that nobody has asked about holds its tensors"
    states += [pending.is_completed(), pending.is_completed()]
    deadline = time.monotonic() + 10  # Gloo's own thread lets go a moment later
    while trace() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return [*states, trace() is None]


def test_an_issued_operation_is_open_until_it_finishes_and_then_releases_its_tensors():
    assert run_ranks(waiting, 2)[0] == [False, True, True, True]


def keeping(rank: int) -> None:
    listener = Waiting()
    group = dist.new_group([0])
    trace = weakref.ref(group)
    with listen(listener):
        dist.all_reduce(torch.ones(2), group=group)
        first = listener.call.group
        dist.all_reduce(torch.ones(2), group=group)
        assert listener.call.group is first, "a group is described once"
    with pytest.raises(AssertionError, match="can be read only while"):
        listener.call.dtype  # noqa: B018
    listener.pending.is_completed()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert trace() is None
    assert listener.call.group == first


def test_a_call_that_is_kept_keeps_neither_tensor_nor_group():
    run_ranks(keeping, 1)


def handmade(rank: int) -> Any:
    store, recorder = dist.HashStore(), CallRecorder()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with listen(recorder):
        group.allreduce([torch.ones(2)]).wait()
    return recorder.calls[0].group


def test_a_group_that_torch_distributed_does_not_know_has_no_members():
    (group,) = run_ranks(handmade, 1)
    assert (group.members, group.rank, group.size) == (None, 0, 1)
