"""On a CUDA device: its progress is known while the host runs ahead, at no cost to the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchscout.observer.device import DeviceProgress, device_of
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 4_000_000_000
"""Cycles: about two seconds."""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ProgressWriter]:
    writer = ProgressWriter.create(tmp_path / "records", 0)
    yield writer
    writer.close()


@pytest.fixture
def coordinate(writer: ProgressWriter) -> Iterator[DeviceProgress]:
    coordinate = DeviceProgress(writer, torch.device("cuda", 0))
    until(writer, lambda step: step == 0)
    yield coordinate
    coordinate.close()


def device_step(writer: ProgressWriter) -> int | None:
    return ProgressReader(writer.path).read().device_step


def until(writer: ProgressWriter, condition: Callable[[int | None], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition(device_step(writer)):
        assert time.monotonic() < deadline, f"the device coordinate is {device_step(writer)}"
        time.sleep(0.01)


def finish_step(writer: ProgressWriter, coordinate: DeviceProgress) -> None:
    writer.next_step()
    coordinate.step_finished(writer.step)


def test_device_progress_lags_behind_the_host_and_catches_up(
    writer: ProgressWriter, coordinate: DeviceProgress
):
    finish_step(writer, coordinate)
    until(writer, lambda step: step == 1)
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(3):
        finish_step(writer, coordinate)
    time.sleep(0.3)  # the thread asks several times
    seen = device_step(writer)
    assert not busy.query(), "the device was done too soon for this test to tell anything"
    assert (writer.step, seen) == (4, 1)
    torch.cuda.synchronize()
    until(writer, lambda step: step == 4)


def test_device_progress_continues_while_the_host_is_blocked(
    writer: ProgressWriter, coordinate: DeviceProgress
):
    last = torch.cuda.Event()
    for _ in range(2):
        torch.cuda._sleep(LONG // 4)
        finish_step(writer, coordinate)
    torch.cuda._sleep(LONG // 2)
    last.record()

    def is_over_once_a_step_is_done() -> bool:
        until(writer, lambda step: step == 1)
        return last.query()

    with ThreadPoolExecutor(1) as pool:
        is_over = pool.submit(is_over_once_a_step_is_done)
        torch.cuda.synchronize()
    assert not is_over.result()


def test_more_steps_than_it_keeps_events_for(writer: ProgressWriter, coordinate: DeviceProgress):
    torch.cuda._sleep(LONG // 4)
    for _ in range(300):
        finish_step(writer, coordinate)
    assert device_step(writer) == 0
    until(writer, lambda step: step == 300)


def test_device_progress_does_not_disturb_the_capture_of_a_graph(
    writer: ProgressWriter, coordinate: DeviceProgress
):
    count = torch.zeros(1, device="cuda")
    count.add_(1)  # loads the kernel, which a capture must not
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # the first capture allocates, and waits for the device
        graph.capture_begin(capture_error_mode="global")
        count.add_(1)
        graph.capture_end()
    graph, busy = torch.cuda.CUDAGraph(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy.record()
    finish_step(writer, coordinate)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        count.add_(1)
        finish_step(writer, coordinate)
        time.sleep(0.3)  # the thread asks several times
        graph.capture_end()
    seen = device_step(writer)
    assert not busy.query(), "the device was done too soon for this test to tell anything"
    assert seen == 0, "a captured step is not finished before the one that was recorded earlier"
    until(writer, lambda step: step == 2)
    graph.replay()
    assert count.item() == 2
    finish_step(writer, coordinate)
    until(writer, lambda step: step == 3)


def test_a_publisher_publishes_device_progress_until_removed(writer: ProgressWriter):
    model = torch.nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    publisher = Publisher(writer)
    publisher.watch_optimizer(optimizer, device_of([model]))
    for _ in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    until(writer, lambda step: step == 3)
    publisher.remove()
    assert device_step(writer) is None
    optimizer.step()
    assert writer.step == 3
