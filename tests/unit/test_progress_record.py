"""The progress record: what a trainer publishes is what its observer reads, whatever happens to the trainer.

Real processes throughout: the functions under "What other processes run" are their programs.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.other_process import line_from, running
from tests.support.small_job import until
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, Window
from torchscout.errors import TornRecordError
from torchscout.observer.record import layout
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import NOWHERE, ProgressWriter, digest_after

WORLD = CommGroup("world", (0, 1, 2, 3), "default group")
EXPERT = CommGroup("expert", (0, 2), "expert group")
ARROW = CommGroup("2>3/7", (2, 3), "2 -> 3", pair=True)
SUM, EXCHANGE = ("all_reduce float32[8] sum", 0x1234), ("all_to_all float32", (1 << 64) - 5)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ProgressWriter]:
    writer = ProgressWriter.create(tmp_path / "job", rank=2)
    yield writer
    writer.close()


# ---------------------------------------------------------------- What other processes run


def hammer(directory: str) -> None:
    """A trainer that does nothing but publish, from two threads."""
    sys.setswitchinterval(1e-5)  # or they would hardly meet
    writer = ProgressWriter.create(Path(directory), rank=0)
    fingerprints = {"left": 11, "right": (1 << 64) - 3, "shared": 1 << 40}
    indices = {
        key: (writer.declare(CommGroup(key, (0, 1), key)), writer.phrase(f"text of {key}", fingerprint))
        for key, fingerprint in fingerprints.items()
    }
    print(writer.path, flush=True)

    def publish(own: str, seed: int) -> None:
        for turn in range(10**9):
            for key in (own, "shared"):
                splits = (turn,) * (turn % 9) if turn % 3 else None
                writer.issue(*indices[key], splits, splits)
                writer.advance(Phase.FORWARD)
            writer.time_phase(Phase.INPUT, 0.5)
            writer.device_step(turn)
            if turn % 7 == seed:
                writer.next_step()
            if turn % 1000 == 0:
                writer.declare(CommGroup(f"{own} {turn}", tuple(range(turn)), "late"))

    threading.Thread(target=publish, args=("left", 0), daemon=True).start()
    publish("right", 3)


def interrupt(directory: str) -> None:
    """A trainer whose signal handler publishes too, in the middle of publications."""
    writer = ProgressWriter.create(Path(directory), rank=0)
    world, phrase = writer.declare(WORLD), writer.phrase(*SUM)
    handled = 0

    def handler(*_: object) -> None:
        nonlocal handled
        handled += 1
        writer.advance(Phase.CHECKPOINT_WRITE)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    issued = 0
    while handled < 1000:
        writer.issue(world, phrase)
        issued += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    progress = ProgressReader(writer.path).read()
    print(issued, progress.issued["world"], flush=True)
    writer.close()


# ---------------------------------------------------------------- What is published is what is read


def chain(fingerprints: list[int]) -> list[int]:
    """The digests of a line that issues these, worked out by hand from the documented rule."""
    digests, digest = [], 0x243F6A8885A308D3
    for fingerprint in fingerprints:
        mixed = (digest * 0x9E3779B97F4A7C15 + fingerprint) % 2**64
        digest = mixed ^ (mixed >> 32)
        digests.append(digest)
    return digests


def test_a_reader_reads_all_of_it(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    before = reader.read()
    assert (before.step, before.operation, before.phase, before.issued) == (0, 0, Phase.START, {})
    world, expert, arrow = (writer.declare(line) for line in (WORLD, EXPERT, ARROW))
    total, exchange = writer.phrase(*SUM), writer.phrase(*EXCHANGE)
    writer.next_step()
    writer.next_step()
    writer.advance(Phase.FORWARD)
    assert [writer.issue(world, total), writer.issue(arrow, total), writer.issue(world, total)] == [1, 1, 2]
    writer.advance(Phase.BACKWARD)
    assert writer.issue(expert, exchange, (3, 0), (1, 1 << 40)) == 1
    writer.time_phase(Phase.INPUT, 0.25)
    writer.device_step(1)
    writer.pause()
    writer.finished()
    first, second = chain([SUM[1], SUM[1]])
    (exchanged,) = chain([EXCHANGE[1]])
    assert reader.trainer() is Process.RUNNING
    assert replace(reader.read(), silent_seconds=0.0) == Progress(
        rank=2,
        step=2,
        operation=6,
        phase=Phase.BACKWARD,
        issued={"world": 2, "expert": 1, "2>3/7": 1},
        recent=Window(
            [
                IssuedOp("world", 1, SUM[1], first, SUM[0]),
                IssuedOp("2>3/7", 1, SUM[1], first, SUM[0]),
                IssuedOp("world", 2, SUM[1], second, SUM[0]),
                IssuedOp("expert", 1, EXCHANGE[1], exchanged, EXCHANGE[0], (3, 0), (1, 1 << 40)),
            ]
        ),
        at_communication=True,
        silent_seconds=0.0,
        device_step=1,
    )
    assert reader.groups() == {group.key: group for group in (WORLD, EXPERT, ARROW)}
    assert len(reader.step_seconds()) == 2
    assert reader.phase_seconds(Phase.INPUT) == [0.25]
    assert (reader.paused, reader.has_finished, reader.dropped) == (True, True, 0)
    assert (reader.rank, reader.pid) == (2, os.getpid())


def test_communication_is_the_last_event_until_something_else_is_published(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    index, phrase = writer.declare(WORLD), writer.phrase(*SUM)
    assert not reader.read().at_communication
    writer.issue(index, phrase)
    writer.device_step(4)
    writer.pause()
    writer.resume()
    assert reader.read().at_communication
    writer.advance(Phase.FORWARD)
    assert not reader.read().at_communication
    writer.issue(index, phrase)
    writer.next_step()
    assert not reader.read().at_communication


def test_a_job_that_goes_on_counts_on(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    writer.start_from(40)
    assert (reader.read().step, reader.read().phase) == (40, Phase.START)
    writer.next_step()
    assert reader.read().step == writer.step == 41


def test_a_glance_is_a_reading_without_the_operations(writer: ProgressWriter):
    writer.next_step()
    writer.issue(writer.declare(WORLD), writer.phrase(*SUM))
    reader = ProgressReader(writer.path)
    whole = reader.read(now=1e9)
    assert whole.recent
    assert reader.glance(now=1e9) == replace(whole, issued={}, recent=Window())


def test_the_ring_keeps_the_last_64(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    world, expert, phrase = writer.declare(WORLD), writer.declare(EXPERT), writer.phrase(*SUM)
    writer.issue(expert, phrase)
    for _ in range(1000):
        writer.issue(world, phrase)
    progress = reader.read()
    assert [each.number for each in progress.recent] == list(range(937, 1001))
    assert progress.issued == {"world": 1000, "expert": 1}
    digests = chain([SUM[1]] * 1000)
    assert [each.digest for each in progress.recent] == digests[936:]


def test_silence_is_counted_from_the_last_news(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    writer.advance(Phase.INPUT)
    later = time.monotonic() + 1000
    assert reader.read(later).silent_seconds == pytest.approx(1000, abs=60)
    assert reader.read(later - 2000).silent_seconds == 0

    published = reader.read(later).silent_seconds
    writer.time_phase(Phase.INPUT, 1.0)
    writer.pause()
    assert reader.read(later).silent_seconds == published
    writer.resume()
    resumed = reader.read(later).silent_seconds
    writer.device_step(3)
    news = reader.read(later).silent_seconds
    writer.device_step(3)
    assert published > resumed > news == reader.read(later).silent_seconds


def test_the_first_a_paused_and_a_checkpointing_step_do_not_look_slow(writer: ProgressWriter):
    reader, begin = ProgressReader(writer.path), time.monotonic()
    time.sleep(0.05)  # start-up, compilation
    writer.next_step()
    assert reader.step_seconds() == [0.0]
    time.sleep(0.05)
    writer.time_phase(Phase.CHECKPOINT_WRITE, 0.05)
    writer.leave_out(Phase.CHECKPOINT_WRITE, 0.05)
    writer.next_step()
    writer.pause()
    time.sleep(0.05)
    writer.resume()
    writer.next_step()
    writer.next_step()
    assert len(reader.step_seconds()) == 3
    assert reader.phase_seconds(Phase.CHECKPOINT_WRITE) == [0.05]
    # However slow this machine is, none of the three was counted.
    assert 0 < sum(reader.step_seconds()) <= time.monotonic() - begin - 0.15


def test_recent_durations_are_kept_oldest_first(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    for number in range(100):
        writer.time_phase(Phase.CHECKPOINT_READ, float(number))
    assert reader.phase_seconds(Phase.CHECKPOINT_READ) == [float(number) for number in range(36, 100)]
    assert reader.phase_seconds(Phase.CHECKPOINT_WRITE) == []


def test_digests_tell_order_and_history():
    def digest(*fingerprints: int) -> int:
        value = 0
        for fingerprint in fingerprints:
            value = digest_after(value, fingerprint)
        return value

    assert digest(1, 2, 3) == digest(1, 2, 3)
    different = [digest(1, 2, 3), digest(3, 2, 1), digest(1, 3, 2), digest(1, 2), digest(1, 2, 3 ^ 1 << 63)]
    assert len(set(different)) == len(different)
    assert all(0 <= value < 1 << 64 for value in different)


# ---------------------------------------------------------------- What the library refuses


def test_an_operation_that_was_refused_is_as_if_it_had_not_been_published(writer: ProgressWriter):
    reader, world, phrase = ProgressReader(writer.path), writer.declare(WORLD), writer.phrase(*SUM)
    expert, exchange = writer.declare(EXPERT), writer.phrase(*EXCHANGE)
    writer.issue(world, phrase)
    writer.issue(expert, phrase)
    before = reader.read(now=0.0)
    writer.take_back(world, writer.issue(world, exchange))
    after = reader.read(now=0.0)
    assert (after.issued, after.recent, after.at_communication) == (before.issued, before.recent, False)
    assert after.coordinate > before.coordinate, "that the rank tried is progress"
    writer.issue(world, phrase)
    assert reader.read().recent[-1].digest == chain([SUM[1], SUM[1]])[-1]
    writer.take_back(NOWHERE, 0)
    assert reader.dropped == 0


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["in their order", "the last one first"])
def test_what_cannot_be_taken_back_makes_the_record_incomplete(
    writer: ProgressWriter, order: tuple[int, ...]
):
    """Two threads have published before the library refuses the operations of both."""
    reader, world, phrase = ProgressReader(writer.path), writer.declare(WORLD), writer.phrase(*SUM)
    for _ in range(2):
        writer.issue(world, phrase)
    for number in order:
        writer.take_back(world, number)
    assert (reader.dropped, reader.read().issued["world"]) == (1, 1)


# ---------------------------------------------------------------- What does not fit


def test_long_lists_of_members_come_through(writer: ProgressWriter):
    every_member = [
        tuple(range(100_000)),
        tuple(range(3, 100_000, 8)),
        tuple(node * 8 + place for node in range(500) for place in (1, 5)),
        (7, 7, 2, 9, *range(20, 30), 1, 40),
        (4,),
        (),
    ]
    groups = {str(number): CommGroup(str(number), each, "name") for number, each in enumerate(every_member)}
    for number, group in enumerate(groups.values()):
        assert writer.declare(group) == writer.declare(group) == number
    assert ProgressReader(writer.path).groups() == groups


def test_too_many_groups_are_counted_and_change_nothing_else(writer: ProgressWriter):
    reader, phrase = ProgressReader(writer.path), writer.phrase(*SUM)
    indices = [writer.declare(CommGroup(str(number), (0, 1), "")) for number in range(layout.LINES + 3)]
    assert indices == [*range(layout.LINES), *[NOWHERE] * 3]
    assert writer.declare(CommGroup("5", (0, 1), "")) == 5
    writer.issue(5, phrase)
    assert writer.issue(NOWHERE, phrase) == 0
    progress = reader.read()
    assert (reader.dropped, len(progress.issued), progress.issued["5"]) == (3, layout.LINES, 1)
    assert (progress.operation, progress.at_communication) == (2, False)


def test_too_many_phrases_lose_their_text_but_not_their_fingerprint(writer: ProgressWriter):
    reader, world = ProgressReader(writer.path), writer.declare(WORLD)
    phrases = [writer.phrase(f"operation {number}", number) for number in range(3000)]
    assert writer.phrase("operation 7", 7) == phrases[7]
    writer.issue(world, phrases[7])
    writer.issue(world, phrases[2999])
    kept, lost = reader.read().recent
    assert (kept.text, kept.fingerprint) == ("operation 7", 7)
    assert (lost.text, lost.fingerprint) == ("unlisted 0000000000000bb7", 2999)
    assert [kept.digest, lost.digest] == chain([7, 2999])
    assert reader.dropped == 0, "no operation is missing"


def test_a_full_journal_drops_and_counts(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    irregular = tuple(rank * rank for rank in range(40_000))
    indices = [writer.declare(CommGroup(str(number), irregular, "")) for number in range(4)]
    assert indices[0] == 0
    assert indices[-1] == NOWHERE
    assert reader.dropped == indices.count(NOWHERE)
    assert list(reader.groups()) == [str(number) for number in range(4) if indices[number] != NOWHERE]


def test_splits_of_many_members_are_left_out(writer: ProgressWriter):
    world, phrase = writer.declare(WORLD), writer.phrase(*EXCHANGE)
    writer.issue(world, phrase, range(64), range(65))
    writer.issue(world, phrase, range(65), range(65))
    first, second = ProgressReader(writer.path).read().recent
    assert (first.sends, first.receives) == (tuple(range(64)), None)
    assert (second.sends, second.receives) == (None, None)


# ---------------------------------------------------------------- Never torn


def test_a_reader_never_sees_half_a_record(tmp_path: Path):
    fingerprints = {"left": 11, "right": (1 << 64) - 3, "shared": 1 << 40}
    digests = {key: [0, *chain([fingerprint])] for key, fingerprint in fingerprints.items()}
    with running(hammer, tmp_path / "job") as trainer:
        reader = ProgressReader(Path(line_from(trainer)))
        last, reads = reader.read(), 0
        while reads < 1000 or last.step <= 100:
            progress = reader.read()
            reads += 1
            check_against(last, progress)
            for each in progress.recent:
                known = digests[each.group]
                while len(known) <= each.number:
                    known.append(digest_after(known[-1], fingerprints[each.group]))
                assert each.digest == known[each.number]
                assert (each.text, each.fingerprint) == (f"text of {each.group}", fingerprints[each.group])
            last = progress


def test_heads_never_go_back(tmp_path: Path):
    with running(hammer, tmp_path / "job") as trainer:
        path = Path(line_from(trainer))
        with path.open("rb") as file:
            memory = layout.Memory(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        last = 0
        while last <= 10_000:
            head = memory.head()
            if head is not None:
                assert head.number >= last
                last = head.number


def check_against(last: Progress, progress: Progress) -> None:
    """What holds for any two snapshots of ``hammer``, the later one being ``progress``."""
    assert progress.coordinate >= last.coordinate
    assert progress.silent_seconds < 60
    assert progress.operation < 100, "there are a few dozen operations in a step"
    assert all(progress.issued[key] >= count for key, count in last.issued.items())
    assert abs(progress.issued["left"] + progress.issued["right"] - progress.issued["shared"]) <= 2
    numbers: dict[str, list[int]] = {}
    for each in progress.recent:
        numbers.setdefault(each.group, []).append(each.number)
        assert each.sends == each.receives
        assert each.sends is None or len(set(each.sends)) <= 1
    for key, seen in numbers.items():
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        assert seen[-1] == progress.issued[key]


@pytest.mark.parametrize("splits", [None, (5, 6, 7)])
def test_a_write_cut_short_anywhere_leaves_the_last_whole_record(
    writer: ProgressWriter, tmp_path: Path, splits: tuple[int, ...] | None
):
    """Any part of the bytes of an interrupted store may be there: a reader sees before or after."""
    world, expert, phrase = writer.declare(WORLD), writer.declare(EXPERT), writer.phrase(*SUM)
    writer.issue(expert, phrase)
    for _ in range(200):
        writer.issue(world, phrase)
    image = Image(writer.path, tmp_path / "cut short")
    before = image.read()
    writer.issue(expert, phrase, splits, splits)
    after_bytes = writer.path.read_bytes()
    after = ProgressReader(writer.path).read(now=0.0)
    assert (before.issued["expert"], after.issued["expert"]) == (1, 2)

    dice = random.Random(1)
    outcomes = []
    in_order = (layout.RING_AT, layout.JOURNAL_AT), (layout.HEADS_AT, layout.RING_AT), (0, layout.HEADS_AT)
    for begin, end in in_order:
        changed = [at for at in range(begin, end) if image.bytes[at] != after_bytes[at]]
        assert changed
        for _ in range(100):
            image.take(dice.sample(changed, dice.randrange(len(changed))), after_bytes)
            outcomes.append(image.read() == after)
            assert outcomes[-1] or image.read() == before
            image.restore()
        image.keep(changed, after_bytes)
    assert outcomes == sorted(outcomes), "once it is there, it stays"
    assert image.read() == after


class Image:
    """A copy of a record in which single bytes can be those of a later one."""

    def __init__(self, record: Path, path: Path) -> None:
        self.bytes = bytearray(record.read_bytes())
        path.touch(mode=0o600)
        path.write_bytes(self.bytes)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._reader = ProgressReader(path)
        self._taken: list[int] = []

    def read(self) -> Progress:
        return self._reader.read(now=0.0)

    def take(self, places: list[int], later: bytes) -> None:
        self._taken = places
        for at in places:
            self._memory[at] = later[at]

    def restore(self) -> None:
        for at in self._taken:
            self._memory[at] = self.bytes[at]

    def keep(self, places: list[int], later: bytes) -> None:
        for at in places:
            self._memory[at] = self.bytes[at] = later[at]


def test_a_trainer_killed_at_any_moment_leaves_a_record(tmp_path: Path):
    for attempt in range(4):
        with running(hammer, tmp_path / "job") as trainer:
            reader = ProgressReader(Path(line_from(trainer)))
            until(lambda reader=reader: len(reader.read().recent) == 64, "64 operations are published")
            time.sleep(0.003 * attempt)
            trainer.kill()
            trainer.wait()
            progress = reader.read()
            assert len(progress.recent) == 64
            assert progress == replace(reader.read(), silent_seconds=progress.silent_seconds)
            assert reader.trainer() is Process.GONE


@pytest.mark.parametrize(
    ("begin", "end", "stride"),
    [(layout.HEADS_AT, layout.RING_AT, 64), (layout.RING_AT, layout.JOURNAL_AT, 1 << 20)],
    ids=["heads", "an operation"],
)
def test_what_is_never_whole_is_said_to_be_torn(
    writer: ProgressWriter, tmp_path: Path, begin: int, end: int, stride: int
):
    """Whichever bit is wrong between ``begin`` and ``end``, there and at every ``stride`` further on."""
    writer.issue(writer.declare(WORLD), writer.phrase(*EXCHANGE), (5, 6), (7, 8))
    image = Image(writer.path, tmp_path / "torn")
    flipped, whole = bytes(byte ^ 1 for byte in image.bytes), image.read()
    places = [at for at in range(begin, min(end, begin + stride)) if image.bytes[at]]
    assert len(places) > 5
    for at in places[::3]:
        image.take(list(range(at, end, stride)), flipped)
        with pytest.raises(TornRecordError, match="torn"):
            image.read()
        image.restore()
    assert image.read() == whole


def test_a_signal_handler_may_publish_in_the_middle_of_a_publication(tmp_path: Path):
    with running(interrupt, tmp_path / "job") as trainer:
        out, _ = trainer.communicate(timeout=60)
    issued, read = out.split()
    assert issued == read
