"""Snapshots in memory: complete under their names, of one state, and never in the way of training."""

from __future__ import annotations

import fcntl
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.states import Job, all_bits, identity, seed
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.state.collect import SCOUT_PREFIX, State, StateParts, collect

MIB = 1 << 20


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


def begun(snapshots: Snapshots, step: int, state: State) -> Capture:
    """Begin a capture when there is memory for it."""
    snapshots.prepare(state.bytes)
    assert snapshots.wait_until_ready(30)
    return snapshots.capture(identity(step), TrustLevel.LATEST, state)


def ended(
    snapshots: Snapshots, step: int, state: State, meanwhile: Callable[[], object], end: Callable[[], None]
) -> Capture:
    """A capture that is over."""
    while True:
        capture = begun(snapshots, step, state)
        meanwhile()
        end()
        capture.wait(30)
        if not is_too_slow(capture):
            return capture


def is_too_slow(capture: Capture) -> bool:
    """Whether the state was not copied in time, as on a busy machine."""
    return "was not copied within" in str(capture.problem)


def taken(snapshots: Snapshots, step: int, state: State) -> Capture:
    """Capture between two updates."""
    capture = ended(snapshots, step, state, lambda: None, snapshots.fence)
    assert capture.is_sealed, capture.problem
    return capture


def sealed(snapshots: Snapshots, *steps: int) -> list[Capture]:
    return [taken(snapshots, step, job().collect()) for step in steps]


def kept(snapshots: Snapshots) -> list[int]:
    return [each.step for each in snapshots.sealed]


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def mappings(folder: Path) -> set[str]:
    """The addresses at which files of this folder are mapped, with their inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {f"{each.split()[0]} {each.split()[4]}" for each in lines if str(folder) in each}


def of_tensors(**tensors: torch.Tensor) -> State:
    """State that a user has registered, and that may change at any time."""
    holder = SimpleNamespace(state_dict=lambda: tensors, load_state_dict=tensors.update)
    return collect(StateParts(nn.Module(), [], {"holder": holder}))


def with_saved_inputs(model: nn.Module, *inputs: torch.Tensor) -> State:
    holder = SimpleNamespace(state_dict=lambda: [*inputs], load_state_dict=None)
    return collect(StateParts(model, [], {f"{SCOUT_PREFIX}keepsakes": holder}))


# What is captured.


def test_a_snapshot_is_a_valid_shard(snapshots: Snapshots, folder: Path):
    ours = job()
    ours.train(range(2))
    capture = taken(snapshots, 2, ours.collect())
    assert capture.path == shards.path_of(folder, identity(2), holder=0)
    assert shards.verify(capture.path).whole
    header = shards.inspect(capture.path)
    assert (header.identity, header.role) == (identity(2), TrustLevel.LATEST)
    assert {each.name: each.digest for each in header.entries} == capture.digests
    assert stat.S_IMODE(capture.path.stat().st_mode) == 0o400
    bits = all_bits(ours)
    seed(7)
    other = job()
    other.restore(shards.load(capture.path).tree)
    assert all_bits(other) == bits


@pytest.mark.parametrize("width", [8, 30_000], ids=["on the training thread", "in the background"])
def test_later_training_does_not_change_a_snapshot(snapshots: Snapshots, width: int):
    """Buffers change at once, parameters and slots right after the fence, while it is being sealed."""
    ours, step, verified = job(width), 0, 0
    while verified < 5:
        ours.train(range(step, step := step + 1))
        bits = all_bits(ours)
        capture = begun(snapshots, step, ours.collect())
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
        capture.wait(30)
        if not is_too_slow(capture):
            assert shards.verify(capture.path).whole, capture.problem
            found = job(width)
            found.restore(shards.load(capture.path).tree)
            assert all_bits(found) == bits
            verified += 1


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
    capture = taken(snapshots, 1, of_tensors(**odd))
    found = shards.load(capture.path).tree["registered"]["holder"]
    assert all(torch.equal(found[name], odd[name]) for name in odd)
    assert found["one"] is found["two"]


def test_a_header_that_becomes_longer_moves_the_tensors(snapshots: Snapshots):
    words: list[str] = []
    holder = SimpleNamespace(state_dict=lambda: {"words": list(words)}, load_state_dict=None)
    ours = job()
    for step in range(1, 6):
        capture = taken(snapshots, step, collect(StateParts(ours.model, [], {"holder": holder})))
        assert shards.verify(capture.path).whole
        found = shards.load(capture.path).tree
        assert found["registered"]["holder"]["words"] == words
        assert torch.equal(found["parameters"]["0.weight"], ours.model[0].weight)
        words += [f"{step} {number}" for number in range(1000 * step)]


# A capture is of one state.


def write(module: nn.Module, how: str) -> None:
    with torch.no_grad():
        weight = module[0].weight
        (weight.data if how == "through its data" else weight).view(-1)[-1] += 1


@pytest.mark.parametrize("width", [8, 30_000], ids=["small", "large"])
@pytest.mark.parametrize("how", ["in place", "through its data"])
@pytest.mark.parametrize("ends", ["with an update", "without an update"])
def test_a_write_between_two_updates_is_found(snapshots: Snapshots, width: int, how: str, ends: str):
    ours = job(width)
    ours.train(range(1))
    end = snapshots.fence if ends == "with an update" else snapshots.settle
    capture = ended(snapshots, 1, ours.collect(), lambda: write(ours.model, how), end)
    assert capture.problem == "0.weight was changed while it was captured, and not by an update"
    assert not capture.path.exists()
    undisturbed = ended(snapshots, 2, ours.collect(), lambda: None, end)
    assert undisturbed.is_sealed, undisturbed.problem


def test_a_write_that_is_undone_before_the_update_does_no_harm(snapshots: Snapshots):
    """Averaged weights for a validation, for example."""
    ours = job()
    weight = ours.model[0].weight
    own = weight.data
    capture = begun(snapshots, 1, ours.collect())
    weight.data = torch.zeros_like(own)
    weight.data = own
    snapshots.fence()
    assert capture.wait(30), capture.problem
    assert torch.equal(shards.load(capture.path).tree["parameters"]["0.weight"], weight)


def test_nothing_is_sealed_before_the_update(snapshots: Snapshots):
    capture = begun(snapshots, 1, job().collect())
    assert not capture.wait(0.3)
    assert capture.problem is None
    snapshots.fence()
    assert capture.wait(30)


# It never holds training.


def test_all_memory_is_there_before_the_first_capture(snapshots: Snapshots, folder: Path):
    state = job(1000).collect()
    snapshots.prepare(state.bytes)
    assert snapshots.wait_until_ready(30)
    files = inodes(folder)
    assert len(files) == 3
    assert all(path.stat().st_blocks * 512 > state.bytes for path in folder.rglob("*.writing"))
    before = mappings(folder)
    assert len(before) == 3
    for step in range(1, 8):
        taken(snapshots, step, state)
        assert (inodes(folder), mappings(folder)) == (files, before)
    assert snapshots.skipped == 0


def test_a_state_that_grows_within_the_head_room_maps_nothing(snapshots: Snapshots, folder: Path):
    model, inputs = nn.Linear(1000, 1000), list[torch.Tensor]()
    taken(snapshots, 1, with_saved_inputs(model))
    before = (inodes(folder), mappings(folder))
    for step in range(2, 12):
        inputs.append(torch.randn(25_000))
        capture = taken(snapshots, step, with_saved_inputs(model, *inputs))
        assert shards.verify(capture.path).whole
        assert (inodes(folder), mappings(folder)) == before
    assert len(shards.load(capture.path).tree["registered"][f"{SCOUT_PREFIX}keepsakes"]) == 10


def test_a_state_that_outgrows_the_head_room_is_skipped_once(snapshots: Snapshots, folder: Path):
    taken(snapshots, 1, of_tensors(a=torch.ones(MIB)))
    files = inodes(folder)
    assert snapshots.is_ready()
    grown = of_tensors(a=torch.ones(2 * MIB))
    capture = snapshots.capture(identity(2), TrustLevel.LATEST, grown)
    assert re.fullmatch(r"no memory for \d+ bytes is ready", str(capture.problem))
    assert snapshots.skipped == 1
    assert snapshots.wait_until_ready(30)
    capture = snapshots.capture(identity(3), TrustLevel.LATEST, grown)
    snapshots.fence()
    assert capture.wait(30), capture.problem
    assert inodes(folder) == files, "the same files are larger"
    assert shards.verify(shards.path_of(folder, identity(1), 0)).whole


def test_much_too_large_memory_is_given_back(snapshots: Snapshots, folder: Path):
    def in_use() -> int:
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())

    taken(snapshots, 1, of_tensors(a=torch.ones(16 * MIB)))
    most = in_use()
    for step in range(2, 7):
        taken(snapshots, step, of_tensors(a=torch.ones(MIB)))
    assert snapshots.wait_until_ready(30)
    assert in_use() < most / 4


def test_a_capture_does_not_wait_for_the_one_before(snapshots: Snapshots):
    first = begun(snapshots, 1, job().collect())
    assert not snapshots.is_ready()
    second = snapshots.capture(identity(2), TrustLevel.LATEST, job().collect())
    assert second.problem == "the capture before it is not over"
    assert snapshots.skipped == 1
    snapshots.fence()
    assert first.wait(30), first.problem
    taken(snapshots, 3, job().collect())
    assert kept(snapshots) == [1, 3]


def test_the_wait_for_copies_is_bounded(folder: Path):
    """The state takes many times longer to copy than this user lets an update wait."""
    with closing(Snapshots(folder, 0, timeout_seconds=1e-6)) as impatient:
        model = nn.Linear(8 * MIB, 8, bias=False)
        capture = begun(impatient, 1, collect(StateParts(model, [])))
        impatient.fence()
        with torch.no_grad():
            model.weight.fill_(5.0)
        assert not capture.wait(30)
        assert "was not copied within" in str(capture.problem)
        assert impatient.wait_until_ready(30)
        assert kept(impatient) == []


def test_skipped_captures_are_counted_and_logged_once(snapshots: Snapshots, caplog: pytest.LogCaptureFixture):
    for _ in range(3):
        snapshots.skip("rank 1 has no memory")
    assert snapshots.skipped == 3
    assert caplog.text.count("rank 1 has no memory") == 1


def test_saved_inputs_are_copied_when_they_are_replaced(snapshots: Snapshots):
    """They never change in place. One that does all the same shows that it is not copied again."""
    model, first, second = nn.Linear(8, 8), torch.zeros(1000), torch.ones(1000)

    def inputs_of(step: int, *inputs: torch.Tensor) -> list[float]:
        capture = taken(snapshots, step, with_saved_inputs(model, *inputs))
        assert shards.verify(capture.path).whole
        found = shards.load(capture.path).tree["registered"][f"{SCOUT_PREFIX}keepsakes"]
        return [float(each.max()) for each in found]

    assert [inputs_of(step, first, second) for step in (1, 2, 3)] == [[0.0, 1.0]] * 3
    first.fill_(7)
    assert [inputs_of(step, first, second) for step in (4, 5, 6)] == [[0.0, 1.0]] * 3
    third = torch.full((1000,), 3.0)
    assert [inputs_of(step, third, second) for step in (7, 8, 9)] == [[3.0, 1.0]] * 3
    assert inputs_of(10, second, third) == [1.0, 3.0]


# Buffers and their files.


def test_two_whole_snapshots_are_there_while_the_third_is_written(snapshots: Snapshots, folder: Path):
    for step in range(1, 9):
        taken(snapshots, step, job().collect())
        expected = [Generation(each) for each in range(max(1, step - 2), step + 1)]
        assert snapshots.sealed == expected
        assert all(shards.verify(shards.path_of(folder, identity(each.step), 0)).whole for each in expected)
    assert len([*folder.iterdir()]) == 3, "no empty folders are left"


def test_protected_generations_are_not_overwritten(folder: Path):
    protected = frozenset[Generation]()
    with closing(Snapshots(folder, 0, protected=lambda: protected)) as snapshots:
        sealed(snapshots, 1, 2, 3)
        protected = frozenset({Generation(1), Generation(2)})
        sealed(snapshots, 4)
        assert kept(snapshots) == [1, 2, 4]
        protected |= {Generation(4)}
        capture = begun(snapshots, 5, job().collect())
        assert capture.problem == "all 3 snapshots in memory are needed or being read"
        snapshots.retire(Generation(2))
        sealed(snapshots, 6)
        assert kept(snapshots) == [1, 4, 6]


def test_a_snapshot_that_is_read_is_not_reused(snapshots: Snapshots):
    sealed(snapshots, 1, 2, 3)
    with snapshots.held(Generation(1)) as path, snapshots.held(Generation(1)):
        assert path is not None
        before = path.read_bytes()
        sealed(snapshots, 4, 5, 6)
        assert path.read_bytes() == before
        assert kept(snapshots) == [1, 5, 6]
        with snapshots.held(Generation(5)):
            assert not snapshots.is_ready(), "the newest one must stay"
    with snapshots.held(Generation(99)) as path:
        assert path is None
    sealed(snapshots, 8)
    assert kept(snapshots) == [5, 6, 8]


def test_a_snapshot_that_is_retired_while_it_is_read_is_reused_after_that(snapshots: Snapshots, folder: Path):
    sealed(snapshots, 1, 2, 3)
    files = inodes(folder)
    with snapshots.held(Generation(1)) as path:
        assert path is not None
        before = path.read_bytes()
        assert snapshots.retire(Generation(1))
        assert kept(snapshots) == [2, 3]
        sealed(snapshots, 4, 5)
        assert path.read_bytes() == before
    assert not path.exists()
    sealed(snapshots, 6)
    assert kept(snapshots) == [4, 5, 6]
    assert inodes(folder) == files


def test_a_retired_snapshot_is_gone_and_is_the_next_to_be_filled(snapshots: Snapshots):
    *_, last = sealed(snapshots, 1, 2, 3)
    assert snapshots.retire(Generation(3))
    assert not snapshots.retire(Generation(9))
    assert not last.path.exists()
    sealed(snapshots, 4)
    assert kept(snapshots) == [1, 2, 4]


def test_a_snapshot_that_somebody_removed_does_no_harm(snapshots: Snapshots):
    for capture in sealed(snapshots, 1, 2, 3):
        capture.path.unlink()
    for step in range(4, 12):  # some find that there is no file any more
        begun(snapshots, step, job().collect())
        snapshots.fence()
    assert snapshots.wait_until_ready(30)
    sealed(snapshots, 12, 13, 14)
    assert kept(snapshots) == [12, 13, 14]


def test_a_shard_that_was_repaired_is_not_taken_for_the_mapped_one(snapshots: Snapshots):
    """The repaired one is another file under the same name."""
    first, *_ = sealed(snapshots, 1, 2, 3)
    repaired = first.path.with_name("repaired")
    repaired.write_bytes(first.path.read_bytes())
    repaired.replace(first.path)
    with snapshots.held(Generation(1)) as path:
        assert path == first.path
    for step in range(4, 9):
        begun(snapshots, step, job().collect())
        snapshots.fence()
    assert snapshots.wait_until_ready(30)
    for capture in sealed(snapshots, 9, 10, 11):
        assert shards.inspect(capture.path).identity == capture.identity
        assert shards.verify(capture.path).whole


def test_a_restarted_job_reuses_the_files_although_a_child_of_the_last_one_has_them_open(folder: Path):
    """A loader's worker has its parent's open files, and with them the locks."""
    with closing(Snapshots(folder, 0)) as first:
        sealed(first, 1, 2, 3)
    files = inodes(folder)
    with ExitStack() as open_files:
        for path in folder.rglob("*.shard"):
            fcntl.flock(open_files.enter_context(path.open("rb")), fcntl.LOCK_EX)
        with closing(Snapshots(folder, 0)) as second:
            assert kept(second) == [1, 2, 3]
            sealed(second, 4)
            assert kept(second) == [2, 3, 4]
            assert inodes(folder) == files
    assert all(shards.verify(path).whole for path in folder.rglob("*.shard"))


def test_what_a_killed_job_has_left_is_not_taken_for_whole(folder: Path):
    """A file that was killed while it was sealed is complete and read-only, and has a temporary name."""
    with closing(Snapshots(folder, 0)) as first:
        (capture,) = sealed(first, 1)
    left = folder / ".rank-0.abc.writing"
    left.write_bytes(capture.path.read_bytes())
    left.chmod(0o400)
    with closing(Snapshots(folder, 0)) as second:
        assert kept(second) == [1]
        assert shards.clean(folder) == [left]
        sealed(second, 2)
        assert kept(second) == [1, 2]


def test_a_living_owners_files_are_not_cleaned_away(snapshots: Snapshots, folder: Path):
    sealed(snapshots, 1)
    waiting = {*folder.glob("*.writing")}
    assert len(waiting) == 2
    Snapshots(folder, 0).close()
    assert shards.clean(folder) == []
    assert {*folder.glob("*.writing")} == waiting
    snapshots.close()
    assert not [*folder.glob("*.writing")]


def test_a_generation_is_never_overwritten(snapshots: Snapshots):
    (first,) = sealed(snapshots, 1)
    before = first.path.read_bytes()
    ours = job()
    ours.train(range(1))
    again = begun(snapshots, 1, ours.collect())
    snapshots.fence()
    assert not again.wait(30)
    assert "is sealed and is not overwritten" in str(again.problem)
    assert first.path.read_bytes() == before


# Failures.


def test_too_large_a_state_is_a_problem_with_numbers(folder: Path):
    with closing(Snapshots(folder, 0, limit=1000)) as snapshots:
        state = job().collect()
        capture = snapshots.capture(identity(1), TrustLevel.LATEST, state)
        assert not capture.wait(0)
        for number in (state.bytes, 1000):
            assert str(number) in str(capture.problem)


def test_a_failure_is_a_problem_of_this_capture_alone(snapshots: Snapshots, folder: Path):
    capture = begun(snapshots, 1, job().collect())
    folder.rename(folder.with_name("away"))
    snapshots.fence()
    assert not capture.wait(30)
    assert capture.problem is not None
    folder.with_name("away").rename(folder)
    sealed(snapshots, 2)


def test_a_tensor_without_memory_is_a_problem_too(snapshots: Snapshots):
    capture = begun(snapshots, 1, State(None, {"a": torch.empty(2, device="meta")}, {}))
    snapshots.fence()
    assert not capture.wait(30)
    assert "meta" in str(capture.problem)
    sealed(snapshots, 2)


def test_closing_finishes_a_capture_and_later_ones_say_so(folder: Path):
    snapshots = Snapshots(folder, 0)
    capture = begun(snapshots, 1, job(512).collect())
    snapshots.close()
    snapshots.close()
    assert capture.is_sealed
    assert shards.verify(capture.path).whole
    late = snapshots.capture(identity(2), TrustLevel.LATEST, job().collect())
    snapshots.fence()
    assert late.problem == "the snapshots are closed"
    assert not snapshots.is_ready()


def test_copies_must_leave_one_that_is_whole(folder: Path):
    with pytest.raises(ValueError, match="at least 2"):
        Snapshots(folder, 0, copies=1)
