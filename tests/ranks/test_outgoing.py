"""Snapshots on their way elsewhere, over a connection that stops in the middle, to a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.replica_ranks import Rank, Wire, identity, seal
from tests.support.small_job import until
from torchscout.checkpoint.background_writer import BackgroundWriter
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member
from torchscout.state.collect import StateParts, collect
from torchscout.utils.network import new_token

WIDTH = 3200
"""Of a state of 40 MB: more than may be on its way at once."""
PATIENCE = 2.0


@dataclass
class Side:
    """Rank 0, here, whose copies go to rank 1."""

    folder: Path
    peer: Rank
    wire: Wire
    replicator: Replicator
    snapshots: Snapshots
    model: nn.Module
    ends: ExitStack

    def outgoing(self, *wards: int, patience: float = PATIENCE) -> BackgroundWriter:
        made = BackgroundWriter(
            Member(job="job", mesh="replica=2", world_size=2, rank=0),
            self.folder / "a",
            self.folder / "disk",
            self.snapshots,
            self.replicator,
            wards,
            patience,
        )
        self.ends.callback(made.close)
        return made

    def captured(self, step: int) -> Capture:
        state = collect(StateParts(self.model, [], {}))
        self.snapshots.prepare(state.bytes)
        assert self.snapshots.wait_until_ready(30)
        capture = self.snapshots.capture(identity(0, step), TrustLevel.LATEST, state)
        self.snapshots.fence()
        assert capture.wait(30), capture.problem
        return capture

    def held_up(self, outgoing: BackgroundWriter, step: int) -> None:
        """A copy of which half is there."""
        outgoing.take(self.captured(step), is_due=False)
        until(self.wire.held_up.is_set, "half of it is there")


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    token = new_token()
    (tmp_path / "a").mkdir(mode=0o700)
    with ExitStack() as ends:
        peer = Rank(1, tmp_path / "b", token, patience=30.0)
        ends.callback(peer.end)
        wire = Wire(peer.address, hold_after=20 << 20)
        ends.callback(wire.close)
        replicator = Replicator(0, tmp_path / "a", token)
        ends.callback(replicator.close)
        replicator.connect([replicator.address, wire.address], ["a", "b"])
        peer.ask("connect", [replicator.address, wire.address], ["a", "b"])
        snapshots = Snapshots(tmp_path / "a", 0)
        ends.callback(snapshots.close)
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        yield Side(tmp_path, peer, wire, replicator, snapshots, model, ends)


def test_files_do_not_wait_for_a_copy_that_is_held_up(side: Side):
    outgoing = side.outgoing(patience=60.0)
    side.held_up(outgoing, 1)
    outgoing.take(side.captured(2), is_due=True)
    until(lambda: outgoing.is_written(Generation(2)), "it is written", 20)
    assert not side.replicator.held()


def test_a_snapshot_that_is_being_copied_stays_as_it_is_however_long_that_takes(side: Side):
    outgoing = side.outgoing()
    side.held_up(outgoing, 1)
    deadline = time.monotonic() + 1.5 * PATIENCE
    step = 1
    while time.monotonic() < deadline or step < 6:
        with torch.no_grad():
            side.model.weight.add_(1)
        outgoing.take(side.captured(step := step + 1), is_due=False)
    side.wire.released.set()
    until(lambda: Generation(1) in side.replicator.held(), "it came")
    assert shards.verify(shards.path_of(side.folder / "b", identity(0, 1), 1)).whole
    assert outgoing.problems() == []


def test_a_copy_that_is_no_longer_needed_is_given_up_with_a_message_and_a_later_one_is_made(side: Side):
    outgoing = side.outgoing()
    side.held_up(outgoing, 1)
    side.replicator.retire([Generation(1)])
    problems: list[str] = []

    def is_said() -> bool:
        problems.extend(outgoing.problems())
        return any("come too late" in each for each in problems)

    until(is_said, "it is said")
    side.wire.released.set()
    outgoing.take(side.captured(2), is_due=False)  # passed over: it would come too late as well
    outgoing.take(side.captured(3), is_due=False)
    until(lambda: side.replicator.held() == {Generation(3)}, "it came")


def test_a_due_write_completes_once_copies_of_others_are_in_files(side: Side):
    side.wire.released.set()
    outgoing = side.outgoing(1)
    outgoing.take(side.captured(2), is_due=True)
    own, theirs = (shards.path_of(side.folder / "disk", identity(rank, 2), 0) for rank in (0, 1))
    until(own.exists, "its own file is there")
    assert not outgoing.is_written(Generation(2))
    side.peer.ask("send", str(seal(side.peer.memory, 1, 2)))
    until(lambda: outgoing.is_written(Generation(2)), "both are there")
    assert shards.verify(theirs).whole
    assert outgoing.problems() == []


def test_a_missing_copy_is_reported_and_does_not_prevent_the_own_file(side: Side):
    outgoing = side.outgoing(1)
    outgoing.take(side.captured(2), is_due=True)
    until(shards.path_of(side.folder / "disk", identity(0, 2), 0).exists, "its own file is there")
    until(lambda: "the copy of rank 1's step 2 did not arrive" in outgoing.problems(), "it is reported")
