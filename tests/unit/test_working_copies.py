"""Working copies are watched until the next update begins; what training writes to them is no fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchscout.adapters.base import overwritten
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.working_copies import CollectiveWrites, CopyWatch, WorkingCopies


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """A recipe, and the one copy that it watches."""

    def __init__(self) -> None:
        self.copy = torch.arange(8.0)
        self.late: dict[str, str] = {}
        self.model = nn.Identity()
        self.recipe = OwnedStateRecipe(dict, [], copies=CopyWatch(self.copies, [self.model]))

    def copies(self) -> WorkingCopies:
        return WorkingCopies({} if self.late else {"a/weight": self.copy}, self.late)

    def step(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        self.recipe.watch_after(number)
        between()
        self.recipe.update_begins()
        self.copy.add_(1)
        self.recipe.update_ended()

    def check(self) -> list[tuple[int, str]]:
        replay = self.recipe.begin(0, is_source=True)
        replay.prepare([replay.describe()], 0)
        found = self.recipe.changed
        replay.settle()
        replay.release()
        return found

    def flip(self) -> None:
        """PyTorch does not count it."""
        self.copy.data[3] = -1.0


def test_a_change_is_found_though_the_update_overwrites_it():
    job = Job()
    job.step(1)
    job.step(2, job.flip)
    assert job.check() == [(2, "a/weight")]


def test_the_update_itself_is_no_change():
    job = Job()
    job.step(1)
    job.step(2)
    assert job.check() == []
    assert (job.recipe.share, job.recipe.unwatched()) == (1.0, {})


def test_what_pytorch_counts_as_a_write_is_named_and_does_not_reduce_the_share():
    job = Job()
    job.step(1, lambda: job.copy.mul_(2))
    assert job.check() == []
    assert job.recipe.share == 1.0
    assert job.recipe.unwatched() == {"a/weight": "training writes to it between updates"}
    job.step(2)
    job.check()
    assert job.recipe.unwatched() == {}  # it was once


def test_a_copy_in_other_memory_is_not_a_change():
    job = Job()

    def move() -> None:
        job.copy.data = job.copy.detach() + 1

    job.step(1, move)
    assert job.check() == []


@pytest.mark.usefixtures("alone")
def test_what_collectives_write_twice_is_left_out():
    job = Job()

    def receive() -> None:
        dist.all_gather_into_tensor(job.copy.data, torch.rand(8))

    job.step(1, receive)
    assert job.check() == []
    assert job.recipe.unwatched() == {"a/weight": "a collective writes to it between updates"}
    assert "a/weight" in job.recipe.watched_state()
    job.step(2, receive)
    job.check()
    assert "a/weight" not in job.recipe.watched_state()
    job.step(3, job.flip)
    assert job.check() == []
    assert job.recipe.unwatched() == {"a/weight": "a collective writes to it between updates"}
    assert job.recipe.share == 1.0
    job.recipe.close()


@pytest.mark.usefixtures("alone")
def test_another_collective_excuses_nothing():
    job = Job()

    def between() -> None:
        dist.all_reduce(torch.ones(8))
        job.flip()

    job.step(1, between)
    assert job.check() == [(1, "a/weight")]
    job.recipe.close()


def test_what_a_forward_pass_gathers_is_watched_from_then_on():
    job = Job()
    job.late = {"a/weight": "gathered late"}
    job.recipe.start()

    def between() -> None:
        job.flip()  # gathered anew
        job.late = {}
        job.model(torch.ones(1))
        job.copy.data[4] = -1.0

    job.step(1, between)
    assert job.check() == [(1, "a/weight")]
    assert job.recipe.unwatched() == {"a/weight": "gathered late"}
    job.recipe.close()
    assert not job.model._forward_hooks


@pytest.mark.usefixtures("alone")
def test_writes_are_known_by_their_memory():
    whole = torch.zeros(16)
    writes = CollectiveWrites()
    writes.watch({"first": whole[:4], "second": whole[4:8], "last": whole[12:]})
    dist.broadcast(whole[2:6], 0)
    assert writes.written == {"first", "second"}
    dist.all_gather_into_tensor(whole[12:], whole[12:])  # in place: it stays as it is
    assert writes.written == {"first", "second"}
    dist.all_gather_into_tensor(whole[12:], torch.ones(4))
    assert writes.written == {"first", "second", "last"}
    writes.watch({"first": whole[:4]})
    dist.broadcast(whole[4:], 0)
    assert writes.written == frozenset()
    writes.close()


def test_parameters_that_optimizers_update_themselves_are_no_copies():
    model = nn.Linear(2, 2)
    assert overwritten(model, [torch.optim.SGD(model.parameters(), lr=0.1)]) == {}
    model.bias.requires_grad_(False)
    assert overwritten(model, [torch.optim.SGD([model.weight], lr=0.1)]) == {}


def test_parameters_with_masters_are_copies():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    masters = [nn.Parameter(model[0].weight.detach().clone())]
    optimizer = torch.optim.SGD([*masters, model[0].bias], lr=0.1)
    assert overwritten(model, [optimizer]) == {"0/weight": model[0].weight}
