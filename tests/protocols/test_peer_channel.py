"""One suite for every ``PeerChannel``: each test body runs unchanged on all of them."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.thread_peers import on_threads, tree_of_threads
from torchscout.c3 import compare as c3
from torchscout.c3.channel import PeerChannel, ProcessGroupChannel, ThreadChannel
from torchscout.decision.types import Status
from torchscout.errors import ChannelError
from torchscout.mesh import Axis, PeerGroup

Body = Callable[..., Any]


def over_threads(body: Body, size: int, *args: Any) -> list[Any]:
    channels = ThreadChannel.create_all(PeerGroup(tuple(range(size)), Axis.REPLICA), timeout=2.0)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda channel: body(channel, *args), channels))


def over_gloo(body: Body, size: int, *args: Any) -> list[Any]:
    return run_ranks(on_a_gloo_rank, size, body, args)


def on_a_gloo_rank(rank: int, body: Body, args: tuple[Any, ...]) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    return body(
        ProcessGroupChannel(PeerGroup(tuple(range(dist.get_world_size())), Axis.REPLICA), group), *args
    )


def over_a_tree(body: Body, size: int, *args: Any) -> list[Any]:
    return on_threads(tree_of_threads(size, 2, timeout=2.0), lambda channel: body(channel, *args))


@pytest.fixture(params=[over_threads, over_gloo, over_a_tree], ids=["threads", "gloo", "tree"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return request.param


def gathering(channel: PeerChannel, sizes: list[int]) -> list[bytes]:
    return channel.gather(payload_of(channel.position, sizes))


def payload_of(position: int, sizes: list[int]) -> bytes:
    return bytes([position + 1]) * sizes[position]


@pytest.mark.parametrize("sizes", [[5, 5, 5], [0, 0, 0], [3, 0, 4088], [4089, 1, 0], [100_000, 4088, 9]])
def test_gather_returns_every_payload_in_peer_order(run, sizes: list[int]):
    assert run(gathering, 3, sizes) == [[payload_of(position, sizes) for position in range(3)]] * 3


def broadcasting(channel: PeerChannel, size: int) -> list[bytes]:
    return [channel.broadcast(bytes([channel.position + 1]) * size, source=source) for source in range(3)]


@pytest.mark.parametrize("size", [0, 7, 4088, 4089, 50_000])
def test_broadcast_returns_the_sources_payload(run, size: int):
    assert run(broadcasting, 3, size) == [[bytes([source + 1]) * size for source in range(3)]] * 3


def alone(channel: PeerChannel) -> tuple[int, list[bytes], bytes]:
    return channel.position, channel.gather(b"me"), channel.broadcast(b"me", source=0)


def test_one_peer_receives_its_own_payload(run):
    assert run(alone, 1) == [(0, [b"me"], b"me")]


def leaving_one_out(channel: PeerChannel) -> str:
    if channel.position == 1:
        return "stayed away"
    try:
        channel.gather(b"hello")
    except ChannelError as error:
        return str(error)
    return "gathered"


def test_a_missing_peer_is_an_error_not_an_endless_wait(run):
    answers = run(leaving_one_out, 3)
    assert answers[1] == "stayed away"
    assert "ranks (0, " in answers[0]  # all of them, or the group of a tree in which one is missing
    assert "ranks (0, " in answers[2]


def voting(channel: PeerChannel) -> list[int]:
    return channel.highest([channel.position, -channel.position, -(1 << 63), (1 << 63) - 1])


def test_the_highest_of_each_value_is_the_same_everywhere(run):
    assert run(voting, 3) == [[2, 0, -(1 << 63), (1 << 63) - 1]] * 3


def comparing(channel: PeerChannel) -> dict[str, tuple[str, tuple[int, ...]]]:
    me = channel.position
    verdicts = c3.compare(channel, {"output": -5, "grad_input": 8 if me == 2 else 3, "split": me % 2})
    return {surface: (verdict.status.value, verdict.outliers) for surface, verdict in verdicts.items()}


def test_c3_decides_alike_everywhere_and_each_surface_apart(run):
    expected = {
        "output": ("agree", ()),
        "grad_input": ("attributed", (2,)),
        "split": ("inconclusive", ()),
    }
    assert run(comparing, 4) == [expected] * 4


class Counted:
    """A channel that counts its exchanges."""

    def __init__(self, channel: PeerChannel) -> None:
        self.peers, self.position, self.exchanges, self._channel = channel.peers, channel.position, 0, channel

    def gather(self, payload: bytes) -> list[bytes]:
        self.exchanges += 1
        return self._channel.gather(payload)

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        self.exchanges += 1
        return self._channel.broadcast(payload, source=source)


def comparing_many(channel: PeerChannel) -> tuple[int, int]:
    counted = Counted(channel)
    verdicts = c3.compare(counted, {f"layer.{i}/output": i for i in range(400)})
    return counted.exchanges, sum(verdict.status is Status.AGREE for verdict in verdicts.values())


def test_many_surfaces_share_one_exchange(run):
    assert run(comparing_many, 2) == [(1, 400)] * 2


def out_of_step(channel: PeerChannel, other: dict[str, int]) -> str:
    with pytest.raises(ValueError, match="different surfaces") as caught:
        c3.compare(channel, other if channel.position == 1 else {"a": 1, "b": 2})
    return str(caught.value)


@pytest.mark.parametrize(("other", "count"), [({"b": 2, "a": 1}, 2), ({"a": 1}, 1), ({}, 0)])
def test_peers_out_of_step_get_the_same_error(run, other: dict[str, int], count: int):
    message = f"ranks [0, 2] sent 2 values; ranks [1] sent {count} values"
    answers = run(out_of_step, 3, other)
    assert len(set(answers)) == 1
    assert message in answers[0]


def bad_arguments(channel: PeerChannel) -> None:
    with pytest.raises(ValueError, match=f"a: {1 << 63} does not fit 64 bits"):
        c3.compare(channel, {"a": 1 << 63})


def test_bad_arguments_are_refused_before_anything_is_sent(run):
    run(bad_arguments, 1)


def wrong_peers(rank: int) -> str:
    with pytest.raises(ValueError, match="the process group has 2 ranks") as caught:
        ProcessGroupChannel(PeerGroup((0, 1, 2), Axis.REPLICA), dist.group.WORLD)
    return str(caught.value)


def test_a_channel_refuses_a_group_of_another_size():
    assert run_ranks(wrong_peers, 2)[0] == "the process group has 2 ranks, its peers are (0, 1, 2)"


def test_the_header_is_not_confused_with_content():
    tricky = struct.pack("<q", 1 << 40)
    assert over_gloo(echoing, 2, tricky) == [[tricky, tricky]] * 2


def echoing(channel: PeerChannel, payload: bytes) -> list[bytes]:
    return channel.gather(payload)
