"""Snapshots in memory: complete under their names, unchanged by later training, and never in its way."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.states import Job, all_bits, identity, seed
from torchscout.checkpoint.snapshot.snapshots import Capture, Snapshots
from torchscout.checkpoint.state.training_state import State, StateParts, collect
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.memory import check_budget, memory_folder
from torchscout.checkpoint.trust.generation import Generation, TrustLevel
from torchscout.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir(mode=0o700)
    return tmp_path / "memory"


@pytest.fixture
def snapshots(folder: Path) -> Iterator[Snapshots]:
    made = Snapshots(folder, 0)
    yield made
    made.close()


def job(width: int = 8) -> Job:
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8))
    return Job(model, [torch.optim.AdamW(model.parameters(), amsgrad=True)])


def taken(snapshots: Snapshots, step: int, ours: Job) -> Capture:
    return snapshots.capture(identity(step), TrustLevel.LATEST, ours.collect())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def temporary(folder: Path) -> list[Path]:
    return [*folder.rglob("*.writing")]


def test_a_snapshot_is_a_valid_shard(snapshots: Snapshots, folder: Path):
    ours = job()
    ours.train(range(2))
    capture = taken(snapshots, 2, ours)
    snapshots.fence()
    assert capture.wait(30)
    assert capture.problem is None
    assert capture.path == shards.path_of(folder, identity(2), holder=0)
    assert shards.verify(capture.path).whole
    header = shards.inspect(capture.path)
    assert (header.identity, header.role) == (identity(2), TrustLevel.LATEST)
    assert stat.S_IMODE(capture.path.stat().st_mode) == 0o400
    bits = all_bits(ours)
    seed(7)
    other = job()
    other.restore(shards.load(capture.path).tree)
    assert all_bits(other) == bits


def test_later_training_does_not_change_a_snapshot(snapshots: Snapshots):
    """Buffers at once, parameters and slots right after the fence; the sealing is still under way then."""
    ours = job(width=512)
    ours.train(range(1))
    for step in range(1, 9):
        bits = all_bits(ours)
        capture = taken(snapshots, step, ours)
        with torch.no_grad():
            for buffer in ours.model.buffers():
                buffer.fill_(-1)
            torch.manual_seed(step)
            ours.optimizers[0].param_groups[0]["lr"] = 0.5
        snapshots.fence()
        with torch.no_grad():
            slots = [slot for slots in ours.optimizers[0].state.values() for slot in slots.values()]
            for tensor in [*ours.model.parameters(), *slots]:
                tensor.fill_(float(step))
        assert capture.wait(30), capture.problem
        assert shards.verify(capture.path).whole
        found = job(width=512)
        found.restore(shards.load(capture.path).tree)
        assert all_bits(found) == bits
        ours.train(range(step, step + 1))


def test_a_change_that_no_fence_announced_is_seen(snapshots: Snapshots):
    """A user's own write to a parameter: the snapshot would be neither the old state nor the new one."""
    module = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(1 << 20)) for index in range(64)})
    state = collect(StateParts(module, [], {}))
    for _ in range(50):  # until the write comes before the end of the copy
        capture = snapshots.capture(identity(1), TrustLevel.LATEST, state)
        with torch.no_grad():
            module["63"].add_(1)
        snapshots.fence()
        if not capture.wait(30):
            break
        snapshots.retire(Generation(1))
    assert capture.problem == "parameters/63 was changed while it was copied, and not by an update"
    assert not capture.path.exists()
    assert taken(snapshots, 2, job()).wait(30), "the next one is not affected"


def test_two_whole_snapshots_are_there_while_the_third_is_written(snapshots: Snapshots, folder: Path):
    ours = job()
    for step in range(1, 12):
        capture = taken(snapshots, step, ours)
        snapshots.fence()
        assert capture.wait(30)
        expected = [Generation(each) for each in range(max(1, step - 2), step + 1)]
        assert snapshots.sealed == expected
        assert all(shards.verify(shards.path_of(folder, identity(each.step), 0)).whole for each in expected)
    assert len(files(folder)) == 3
    assert not temporary(folder)
    assert len([*folder.iterdir()]) == 3, "no empty folders are left"


def test_memory_is_reused(snapshots: Snapshots, folder: Path):
    ours, inodes = job(), []
    for step in range(1, 8):
        ours.optimizers[0].param_groups[0]["lr"] = 10.0**-step / 3  # the header has another length each time
        capture = taken(snapshots, step, ours)
        snapshots.fence()
        assert capture.wait(30)
        inodes.append((capture.path.stat().st_ino, capture.path.stat().st_size))
    assert inodes[3:6] == inodes[:3]
    assert len(set(inodes)) == 3


def test_another_size_needs_other_memory_and_gets_it(snapshots: Snapshots):
    for step, width in enumerate((8, 800, 16, 4, 1200, 8), start=1):
        ours = job(width)
        bits = all_bits(ours)
        capture = taken(snapshots, step, ours)
        snapshots.fence()
        assert capture.wait(30), capture.problem
        other = job(width)
        other.restore(shards.load(capture.path).tree)
        assert all_bits(other) == bits


def test_captures_that_come_faster_than_sealing_wait_for_it(snapshots: Snapshots):
    ours = job(2048)
    captures = [taken(snapshots, step, ours) for step in range(1, 6)]
    snapshots.fence()
    assert all(each.wait(30) for each in captures)
    assert snapshots.sealed == [Generation(3), Generation(4), Generation(5)]


def test_a_snapshot_that_is_read_is_not_reused(snapshots: Snapshots):
    ours = job()
    for step in (1, 2, 3):
        assert taken(snapshots, step, ours).wait(30)
    with snapshots.held(Generation(1)) as path, snapshots.held(Generation(1)):
        assert path is not None
        before = path.read_bytes()
        for step in (4, 5, 6):
            assert taken(snapshots, step, ours).wait(30)
        assert path.read_bytes() == before
        assert snapshots.sealed == [Generation(1), Generation(5), Generation(6)]
        with snapshots.held(Generation(5)), snapshots.held(Generation(6)):
            capture = taken(snapshots, 7, ours)
            assert not capture.wait(30)
            assert capture.problem == "all 3 snapshots in memory are needed or being read"
    with snapshots.held(Generation(99)) as path:
        assert path is None
    assert taken(snapshots, 8, ours).wait(30)
    assert snapshots.sealed == [Generation(5), Generation(6), Generation(8)]


def test_a_snapshot_that_is_retired_while_it_is_read_can_be_read_to_its_end(snapshots: Snapshots):
    ours = job()
    assert taken(snapshots, 1, ours).wait(30)
    with snapshots.held(Generation(1)) as path:
        assert path is not None
        before = path.read_bytes()
        with path.open("rb") as file:
            snapshots.retire(Generation(1))
            for step in range(2, 8):
                assert taken(snapshots, step, ours).wait(30)
            assert file.read() == before
    assert not path.exists()


def test_a_child_that_outlives_its_trainer_keeps_nobody_from_capturing(folder: Path):
    """A loader's worker has its parent's open files, and with them the locks."""
    ours = job()
    first = Snapshots(folder, 0)
    for step in (1, 2, 3):
        assert taken(first, step, ours).wait(30)
    first.close()
    with ExitStack() as files:
        for path in folder.rglob("*.shard"):
            fcntl.flock(files.enter_context(path.open("rb")), fcntl.LOCK_EX)
        second = Snapshots(folder, 0)
        for step in (4, 5, 6):
            assert taken(second, step, ours).wait(30)
        assert second.sealed == [Generation(4), Generation(5), Generation(6)]
        second.close()


def test_a_retired_snapshot_is_gone_and_is_the_next_to_be_filled(snapshots: Snapshots):
    ours = job()
    captures = [taken(snapshots, step, ours) for step in (1, 2, 3)]
    assert captures[-1].wait(30)
    snapshots.retire(Generation(3))
    assert not captures[2].path.exists()
    assert taken(snapshots, 4, ours).wait(30)
    assert snapshots.sealed == [Generation(1), Generation(2), Generation(4)]


def test_a_snapshot_that_somebody_removed_does_no_harm(snapshots: Snapshots):
    ours = job()
    for step in (1, 2, 3):
        capture = taken(snapshots, step, ours)
        assert capture.wait(30)
        capture.path.unlink()
    for step in (4, 5, 6, 7):
        assert taken(snapshots, step, ours).wait(30)
    assert snapshots.sealed == [Generation(5), Generation(6), Generation(7)]


def test_a_restarted_job_reuses_the_files(folder: Path):
    ours = job()
    first = Snapshots(folder, 0)
    for step in (1, 2, 3):
        assert taken(first, step, ours).wait(30)
    first.close()
    inodes = {path.stat().st_ino for path in folder.rglob("*.shard")}
    second = Snapshots(folder, 0)
    assert second.sealed == [Generation(1), Generation(2), Generation(3)]
    assert taken(second, 4, ours).wait(30)
    assert second.sealed == [Generation(2), Generation(3), Generation(4)]
    assert {path.stat().st_ino for path in folder.rglob("*.shard")} == inodes
    second.close()


def test_unfinished_files_of_a_killed_job_are_reused_and_damaged_ones_first(folder: Path):
    ours = job()
    first = Snapshots(folder, 0)
    for step in (1, 2):
        assert taken(first, step, ours).wait(30)
    first.close()
    (folder / ".rank-0.abc.writing").write_bytes(b"half a snapshot")
    (folder / ".rank-1.abc.writing").write_bytes(b"another rank's")
    damaged = shards.path_of(folder, identity(2), 0)
    damaged.chmod(0o600)
    damaged.write_bytes(b"nonsense")
    second = Snapshots(folder, 0)
    assert second.sealed == [Generation(1)]
    for step in (3, 4):
        assert taken(second, step, ours).wait(30)
        assert second.sealed[0] == Generation(1)
    assert not damaged.exists()
    second.close()
    assert [path.name for path in temporary(folder)] == [".rank-1.abc.writing"]


def test_a_file_of_a_job_that_was_killed_while_it_sealed_is_reused(folder: Path):
    """It is read-only already, which only root may write to."""
    left = folder / ".rank-0.abc.writing"
    left.write_bytes(b"a whole snapshot")
    left.chmod(0o400)
    snapshots = Snapshots(folder, 0)
    assert left.stat().st_mode & 0o777 == 0o600
    assert taken(snapshots, 1, job()).wait(30)
    assert not left.exists()
    snapshots.close()
    assert temporary(folder) == []


def test_a_living_owners_file_is_not_taken_over_nor_cleaned_away(snapshots: Snapshots, folder: Path):
    assert taken(snapshots, 1, job()).wait(30)
    deadline = time.monotonic() + 30
    while not any(map(os.path.getsize, temporary(folder))) and time.monotonic() < deadline:
        time.sleep(0.01)  # the next one is prepared after the first is sealed, and locked before it is sized
    (path,) = temporary(folder)
    other = Snapshots(folder, 0)
    other.close()
    assert shards.clean(folder) == []
    assert path.exists()
    snapshots.close()
    assert not temporary(folder)


def test_a_generation_is_never_overwritten(snapshots: Snapshots):
    ours = job()
    first = taken(snapshots, 1, ours)
    assert first.wait(30)
    before = first.path.read_bytes()
    ours.train(range(1))
    again = taken(snapshots, 1, ours)
    assert not again.wait(30)
    assert again.problem is not None
    assert "is sealed and is not overwritten" in again.problem
    assert first.path.read_bytes() == before


def test_a_flipped_bit_in_memory_is_found(snapshots: Snapshots):
    ours = job()
    ours.train(range(1))
    capture = taken(snapshots, 1, ours)
    assert capture.wait(30)
    header = shards.inspect(capture.path)
    entries = [each for each in header.entries if each.length]
    capture.path.chmod(0o600)
    with capture.path.open("r+b", buffering=0) as file:
        for entry in (entries[0], entries[len(entries) // 2], entries[-1]):
            for place in (entry.offset, entry.end - 1):
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 16]))
                assert shards.verify(capture.path).damaged == (entry.name,)
                file.seek(place)
                file.write(bytes([byte]))
        for place in (3, 60, header.start - 1):
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 16]))
            assert not shards.verify(capture.path).whole
            file.seek(place)
            file.write(bytes([byte]))
    assert shards.verify(capture.path).whole


def test_too_large_a_state_is_a_problem_with_numbers(folder: Path):
    snapshots, ours = Snapshots(folder, 0, limit=1000), job()
    capture = taken(snapshots, 1, ours)
    assert not capture.wait(0)
    assert capture.problem == f"the state has {ours.collect().bytes} bytes, a snapshot may have 1000"
    snapshots.close()


def test_a_failure_is_a_problem_of_this_capture_alone(snapshots: Snapshots, folder: Path):
    if not os.geteuid():
        folder.rename(folder.with_name("away"))
    else:
        folder.chmod(0o500)
    capture = taken(snapshots, 1, job())
    snapshots.fence()
    assert not capture.wait(30)
    assert capture.problem is not None
    if not os.geteuid():
        folder.with_name("away").rename(folder)
    else:
        folder.chmod(0o700)
    assert taken(snapshots, 2, job()).wait(30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unreasonable_state_is_a_problem_too(snapshots: Snapshots):
    state = State({"not": object()}, {}, {})  # type: ignore[arg-type]
    meta = State(None, {"a": torch.empty(2, device="meta")}, {})
    for step, each in enumerate((state, meta)):
        capture = snapshots.capture(identity(step), TrustLevel.LATEST, each)
        snapshots.fence()
        assert not capture.wait(30)
        assert capture.problem


def test_closing_twice_is_no_mistake_and_later_captures_say_so(folder: Path):
    snapshots = Snapshots(folder, 0)
    capture = taken(snapshots, 1, job(512))
    snapshots.close()
    snapshots.close()
    assert capture.is_sealed
    assert shards.verify(capture.path).whole
    late = taken(snapshots, 2, job())
    snapshots.fence()
    assert late.problem == "the snapshots are closed"


def test_prepared_memory_is_what_the_first_snapshot_gets(snapshots: Snapshots, folder: Path):
    snapshots.prepare(10_000)
    capture = taken(snapshots, 1, job())
    assert capture.wait(30)
    assert len(files(folder)) <= 2


def test_the_budget_message_has_the_numbers(folder: Path):
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert check_budget(1000, 3, 3000, folder) == 3000
    assert abs(check_budget(1000, 3, None, folder) - free // 2) < free // 4
    with pytest.raises(CheckpointError, match=r"need 3 x 1.5 KiB = 4.5 KiB in .*, and 4 KiB are allowed"):
        check_budget(1536, 3, 4096, folder)
    with pytest.raises(CheckpointError, match=r"half of the .*GiB free\); set memory_budget"):
        check_budget(free, 3, None, folder)
    with pytest.raises(CheckpointError, match=r"memory_budget; .* are free"):
        check_budget(free, 3, 10 * free, folder)


def test_what_the_job_holds_already_counts_as_free(folder: Path):
    (folder / "old").write_bytes(bytes(64 << 20))
    empty = folder.with_name("empty")
    empty.mkdir()
    more = check_budget(1, 1, None, folder) - check_budget(1, 1, None, empty)
    assert more > 16 << 20


def test_the_memory_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "a" / "b"))
    folder = memory_folder("job-1")
    assert folder == tmp_path / "a" / "b" / "job-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert memory_folder("job-1") == folder
    folder.chmod(0o755)
    with pytest.raises(CheckpointError, match="belongs to this user alone"):
        memory_folder("job-1")
    for name in ("", "../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="a job's name"):
            memory_folder(name)


def test_without_a_variable_memory_is_the_shared_memory_file_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHSCOUT_MEMORY", raising=False)
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no shared-memory file system")
    folder = memory_folder("test-of-the-folder")
    assert folder == Path(f"/dev/shm/torchscout-checkpoints-{os.geteuid()}/test-of-the-folder")
    folder.rmdir()


def test_copies_must_leave_one_that_is_whole(folder: Path):
    with pytest.raises(ValueError, match="at least 2"):
        Snapshots(folder, 0, copies=1)


def test_odd_tensors_come_back(snapshots: Snapshots):
    """Empty, zero-dimensional, strided, of every size, one shared by two places."""
    shared = torch.randn(3)
    holder: dict[str, Any] = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.randn(5, 7).T,
        "flags": torch.tensor([[True, False], [True, True]]).T,
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "one": shared,
        "two": shared,
        "half": torch.randn(3).bfloat16(),
    }

    class Holder:
        def state_dict(self) -> Any:
            return holder

        def load_state_dict(self, state: Any) -> None:
            holder.update(state)

    capture = snapshots.capture(
        identity(1), TrustLevel.LATEST, collect(StateParts(nn.Module(), [], {"holder": Holder()}))
    )
    assert capture.wait(30), capture.problem
    found = shards.load(capture.path).tree["registered"]["holder"]
    assert all(torch.equal(found[name], holder[name]) for name in holder)
    assert found["one"] is found["two"]
