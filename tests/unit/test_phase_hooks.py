"""Marks of phases in DataLoaders and in functions that read and write checkpoints."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

from torchscout.decision.progress import Phase
from torchscout.observer.phase_hooks import mark_phases
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter
from torchscout.utils._torch import DataLoaderIterator
from torchscout.utils.reentrancy import own_work

PLACES = [
    (DataLoader, "__iter__"),
    (DataLoaderIterator, "__next__"),
    (torch, "save"),
    (torch, "load"),
    (torch.serialization, "save"),
    (torch.serialization, "load"),
    *((dcp, name) for name in ("save", "async_save", "load")),
    *((dcp.state_dict_saver, name) for name in ("save", "async_save")),
    (dcp.state_dict_loader, "load"),
]


class Rank:
    """A publisher, and what its observer reads."""

    def __init__(self, folder: Path) -> None:
        self.writer = ProgressWriter.create(folder, 0)
        self.publisher, self.reader = Publisher(self.writer), ProgressReader(self.writer.path)
        self.is_training = True

    def mark(self, **functions: Phase) -> Any:
        named = {name.replace("__", "."): phase for name, phase in functions.items()}
        return mark_phases(self.publisher, named, lambda: self.is_training)

    @property
    def phase(self) -> Phase:
        progress = self.reader.read()
        assert progress is not None
        return progress.phase


class Seen(Dataset[int]):
    """Notes the phase in which each sample is fetched."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks, self.phases = ranks, list[Phase]()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.phases += [each.phase for each in self.ranks]
        return index


class Watched:
    """Notes the phase in which it is pickled."""

    phases: list[Phase] = []  # noqa: RUF012  for all instances, because pickles are copies

    def __init__(self, rank: Rank) -> None:
        self.rank: Rank | None = rank

    def __getstate__(self) -> dict[str, Any]:
        assert self.rank is not None
        self.phases.append(self.rank.phase)
        return {"rank": None}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path / "record")
    Watched.phases.clear()
    yield rank
    rank.writer.close()


def objects() -> list[Any]:
    return [vars(owner)[name] for owner, name in PLACES]


def test_batches_and_checkpoints_are_marked_and_then_everything_is_as_before(rank: Rank, tmp_path: Path):
    before, samples = objects(), Seen(rank)
    undo = rank.mark()
    assert [*DataLoader(samples)] == [0, 1, 2]
    torch.save(Watched(rank), tmp_path / "file")
    assert samples.phases == [Phase.INPUT] * 3
    assert Watched.phases == [Phase.CHECKPOINT_WRITE]
    assert rank.phase is Phase.IDLE
    assert not any(now is then for now, then in zip(objects(), before, strict=True))
    undo()
    assert all(now is then for now, then in zip(objects(), before, strict=True))
    assert [*DataLoader(samples)] == [0, 1, 2]
    assert samples.phases[3:] == [Phase.IDLE] * 3


@pytest.mark.parametrize(("owner", "name"), PLACES[2:])
def test_every_function_of_checkpoints_is_marked_with_its_phase(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
):
    phases = list[Phase]()
    monkeypatch.setattr(owner, name, lambda: phases.append(rank.phase))
    undo = rank.mark()
    getattr(owner, name)()
    undo()
    assert phases == [Phase.CHECKPOINT_READ if name == "load" else Phase.CHECKPOINT_WRITE]


def test_only_batches_are_compared_because_checkpoints_may_differ_in_size(rank: Rank, tmp_path: Path):
    undo = rank.mark()
    [*DataLoader(Seen(rank))]
    torch.save(1, tmp_path / "file")
    torch.load(tmp_path / "file")
    undo()
    assert len(rank.reader.phase_seconds(Phase.INPUT)) == 4  # three batches and the end
    assert rank.reader.phase_seconds(Phase.CHECKPOINT_WRITE) == []
    assert rank.reader.phase_seconds(Phase.CHECKPOINT_READ) == []


def test_what_the_user_announces_takes_precedence_and_is_timed_once(rank: Rank, tmp_path: Path):
    undo, samples = rank.mark(), Seen(rank)
    assert [*rank.publisher.watch_input(DataLoader(samples))] == [0, 1, 2]
    assert len(rank.reader.phase_seconds(Phase.INPUT)) == 4
    with rank.publisher.during(Phase.EVALUATION):
        [*DataLoader(samples)]
        torch.save(Watched(rank), tmp_path / "file")
        with rank.publisher.during(Phase.CHECKPOINT_WRITE):
            assert rank.phase is Phase.CHECKPOINT_WRITE
        assert rank.phase is Phase.EVALUATION
    undo()
    assert samples.phases == [Phase.INPUT] * 3 + [Phase.EVALUATION] * 3
    assert Watched.phases == [Phase.EVALUATION]
    assert len(rank.reader.phase_seconds(Phase.INPUT)) == 4


def test_a_dataset_that_reads_files_is_in_its_input(rank: Rank, tmp_path: Path):
    torch.save(7, tmp_path / "file")

    class Files(Seen):
        def __getitem__(self, index: int) -> int:
            loaded: int = torch.load(tmp_path / "file")
            return super().__getitem__(index) + loaded

    undo, samples = rank.mark(), Files(rank)
    assert [*DataLoader(samples)] == [7, 8, 9]
    undo()
    assert samples.phases == [Phase.INPUT] * 3


@pytest.mark.parametrize("case", ["evaluation mode", "no_grad", "another thread", "own work"])
def test_batches_that_training_does_not_wait_for_are_not_marked(rank: Rank, case: str):
    undo, samples = rank.mark(), Seen(rank)

    def fetch() -> None:
        [*DataLoader(samples)]

    rank.is_training = case != "evaluation mode"
    if case == "no_grad":
        with torch.no_grad():
            fetch()
    elif case == "another thread":
        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    elif case == "own work":
        with own_work():
            fetch()
    else:
        fetch()
    undo()
    assert samples.phases == [Phase.START] * 3


def test_two_sessions_share_the_functions_and_end_in_any_order(rank: Rank, tmp_path: Path):
    before, other = objects(), Rank(tmp_path / "other")
    first, second, samples = rank.mark(), other.mark(), Seen(rank, other)
    [*DataLoader(samples)]
    first()
    [*DataLoader(samples)]
    second()
    other.writer.close()
    assert samples.phases == [Phase.INPUT] * 6 + [Phase.IDLE, Phase.INPUT] * 3
    assert all(now is then for now, then in zip(objects(), before, strict=True))


def test_a_wrapper_that_another_library_installs_meanwhile_stays(rank: Rank, tmp_path: Path):
    original, undo, calls = torch.save, rank.mark(), list[str]()
    ours = torch.save

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append("theirs")
        ours(*args, **kwargs)

    torch.save = theirs
    try:
        undo()
        torch.save(Watched(rank), tmp_path / "file")
        assert (calls, Watched.phases) == (["theirs"], [Phase.START])
        assert torch.serialization.save is original
    finally:
        torch.save = original


def test_errors_and_results_pass_through(rank: Rank, tmp_path: Path):
    undo = rank.mark()
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "nothing")
    assert rank.phase is Phase.IDLE
    batches = iter(DataLoader(Seen(rank)))
    assert type(batches).__mro__[1] is DataLoaderIterator
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(batches)
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    assert copy.deepcopy(torch.save) is torch.save
    undo()


def test_functions_of_a_framework_are_marked_and_missing_ones_are_ignored(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
):
    phases: list[Phase] = []
    monkeypatch.setattr(copy, "written", lambda: phases.append(rank.phase), raising=False)
    original = vars(copy)["written"]
    undo = rank.mark(
        copy__written=Phase.CHECKPOINT_WRITE,
        copy__missing=Phase.CHECKPOINT_WRITE,
        missing__module__function=Phase.CHECKPOINT_READ,
    )
    vars(copy)["written"]()
    undo()
    assert phases == [Phase.CHECKPOINT_WRITE]
    assert vars(copy)["written"] is original


LATER = """
import operator
import sys
from pathlib import Path
from torchscout.observer.phase_hooks import mark_phases
from torchscout.observer.publisher import Publisher
from torchscout.observer.record.writer import ProgressWriter

name = "torch.distributed.checkpoint"
undo = mark_phases(Publisher(ProgressWriter.create(Path(sys.argv[1]), 0)), {}, lambda: True)
assert name not in sys.modules, "it takes long"
import torch.distributed.checkpoint as dcp
names = ("save", "async_save", "load", "state_dict_saver.save", "state_dict_loader.load")
functions = lambda: map(operator.attrgetter, names)
are_marked = lambda: {each(dcp).__code__.co_filename.endswith("phase_hooks.py") for each in functions()}
assert are_marked() == {True}
undo()
assert are_marked() == {False}
"""


@pytest.mark.long
def test_functions_of_a_package_that_is_imported_later_are_marked_then(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LATER, tmp_path / "records"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
