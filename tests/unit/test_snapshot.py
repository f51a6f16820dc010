"""Snapshots in memory: complete under their names, unchanged by later training, and never in its way."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.small_job import until
from tests.support.states import Job, all_bits, identity, seed
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.snapshot.snapshots import Capture, Snapshots
from torchscout.checkpoint.state.training_state import State, StateParts, collect
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.memory import check_budget, memory_folder
from torchscout.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir(mode=0o700)
    return tmp_path / "memory"


@pytest.fixture
def snapshots(folder: Path) -> Iterator[Snapshots]:
    with closing(Snapshots(folder, 0)) as made:
        yield made


def job(width: int = 8) -> Job:
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8))
    return Job(model, [torch.optim.AdamW(model.parameters(), amsgrad=True)])


def taken(snapshots: Snapshots, step: int, ours: Job) -> Capture:
    return snapshots.capture(identity(step), TrustLevel.LATEST, ours.collect())


def sealed(snapshots: Snapshots, *steps: int, ours: Job | None = None) -> list[Capture]:
    """Capture these steps one after the other."""
    captures = []
    for step in steps:
        captures.append(taken(snapshots, step, ours or job()))
        assert captures[-1].wait(30), captures[-1].problem
    return captures


def kept(snapshots: Snapshots) -> list[int]:
    return [each.step for each in snapshots.sealed]


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
    sealed(snapshots, 1, 2, 3)
    with snapshots.held(Generation(1)) as path, snapshots.held(Generation(1)):
        assert path is not None
        before = path.read_bytes()
        sealed(snapshots, 4, 5, 6)
        assert path.read_bytes() == before
        assert kept(snapshots) == [1, 5, 6]
        with snapshots.held(Generation(5)), snapshots.held(Generation(6)):
            capture = taken(snapshots, 7, job())
            assert not capture.wait(30)
            assert "3 snapshots" in str(capture.problem)
    with snapshots.held(Generation(99)) as path:
        assert path is None
    sealed(snapshots, 8)
    assert kept(snapshots) == [5, 6, 8]


def test_a_snapshot_that_is_retired_while_it_is_read_can_be_read_to_its_end(snapshots: Snapshots):
    sealed(snapshots, 1)
    with snapshots.held(Generation(1)) as path:
        assert path is not None
        before = path.read_bytes()
        with path.open("rb") as file:
            snapshots.retire(Generation(1))
            sealed(snapshots, *range(2, 8))
            assert file.read() == before
    assert not path.exists()


def test_a_retired_snapshot_is_gone_and_is_the_next_to_be_filled(snapshots: Snapshots):
    *_, last = sealed(snapshots, 1, 2, 3)
    snapshots.retire(Generation(3))
    assert not last.path.exists()
    sealed(snapshots, 4)
    assert kept(snapshots) == [1, 2, 4]


def test_a_snapshot_that_somebody_removed_does_no_harm(snapshots: Snapshots):
    for capture in sealed(snapshots, 1, 2, 3):
        capture.path.unlink(missing_ok=True)
    sealed(snapshots, 4, 5, 6, 7)
    assert kept(snapshots) == [5, 6, 7]


def test_a_restarted_job_reuses_the_files_although_a_child_of_the_last_one_has_them_open(folder: Path):
    """A loader's worker has its parent's open files, and with them the locks."""
    with closing(Snapshots(folder, 0)) as first:
        sealed(first, 1, 2, 3)
    with closing(Snapshots(folder, 0)) as second:
        inodes = {path.stat().st_ino for path in folder.rglob("*.shard")}
        assert kept(second) == [1, 2, 3]
        sealed(second, 4)
        assert kept(second) == [2, 3, 4]
        assert {path.stat().st_ino for path in folder.rglob("*.shard")} == inodes
    with ExitStack() as open_files:
        for path in folder.rglob("*.shard"):
            fcntl.flock(open_files.enter_context(path.open("rb")), fcntl.LOCK_EX)
        with closing(Snapshots(folder, 0)) as third:
            sealed(third, 5, 6, 7)
            assert kept(third) == [5, 6, 7]


def test_unfinished_files_of_a_killed_job_are_reused_and_damaged_ones_first(folder: Path):
    with closing(Snapshots(folder, 0)) as first:
        sealed(first, 1, 2)
    (folder / ".rank-0.abc.writing").write_bytes(b"half a snapshot")
    (folder / ".rank-1.abc.writing").write_bytes(b"another rank's")
    damaged = shards.path_of(folder, identity(2), 0)
    damaged.chmod(0o600)
    damaged.write_bytes(b"nonsense")
    with closing(Snapshots(folder, 0)) as second:
        assert kept(second) == [1]
        sealed(second, 3, 4)
        assert kept(second)[0] == 1
        assert not damaged.exists()
    assert [path.name for path in temporary(folder)] == [".rank-1.abc.writing"]


def test_a_file_of_a_job_that_was_killed_while_it_sealed_is_reused(folder: Path):
    """It is read-only already, which only root may write to."""
    left = folder / ".rank-0.abc.writing"
    left.write_bytes(b"a whole snapshot")
    left.chmod(0o400)
    with closing(Snapshots(folder, 0)) as snapshots:
        assert left.stat().st_mode & 0o777 == 0o600
        sealed(snapshots, 1)
        assert not left.exists()
    assert temporary(folder) == []


def test_a_living_owners_file_is_not_taken_over_nor_cleaned_away(snapshots: Snapshots, folder: Path):
    sealed(snapshots, 1)
    # The next one is prepared after the first is sealed, and locked before it is sized.
    until(lambda: any(map(os.path.getsize, temporary(folder))), "the next one is prepared", 30)
    (path,) = temporary(folder)
    Snapshots(folder, 0).close()
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


def test_too_large_a_state_is_a_problem_with_numbers(folder: Path):
    snapshots, ours = Snapshots(folder, 0, limit=1000), job()
    capture = taken(snapshots, 1, ours)
    assert not capture.wait(0)
    for number in (ours.collect().bytes, 1000):
        assert str(number) in str(capture.problem)
    snapshots.close()


def test_a_failure_is_a_problem_of_this_capture_alone(snapshots: Snapshots, folder: Path):
    folder.rename(folder.with_name("away"))
    capture = taken(snapshots, 1, job())
    snapshots.fence()
    assert not capture.wait(30)
    assert capture.problem is not None
    folder.with_name("away").rename(folder)
    sealed(snapshots, 2)


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
    odd = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.randn(5, 7).T,
        "flags": torch.tensor([[True, False], [True, True]]).T,
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "one": shared,
        "two": shared,
        "half": torch.randn(3).bfloat16(),
    }
    holder = SimpleNamespace(state_dict=lambda: odd, load_state_dict=odd.update)
    state = collect(StateParts(nn.Module(), [], {"holder": holder}))
    capture = snapshots.capture(identity(1), TrustLevel.LATEST, state)
    assert capture.wait(30), capture.problem
    found = shards.load(capture.path).tree["registered"]["holder"]
    assert all(torch.equal(found[name], odd[name]) for name in odd)
    assert found["one"] is found["two"]
