"""Every tensor of the state by name, always read where it is now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchscout.c3.signature import signature
from torchscout.decision.ownership import BY_DESIGN
from torchscout.state.table import Equality, Kind, StateTable


class Job:
    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.table = StateTable(self.named(), [self.optimizer])
        self.view = self.table.view()

    def named(self) -> dict[str, nn.Parameter]:
        return {f"model/{name}": each for name, each in self.model.named_parameters()}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()

    def signed(self) -> dict[str, int]:
        names = [*self.view.rows]
        return dict(zip(names, self.view.sign(names).read(), strict=True))

    def expected(self) -> dict[str, int]:
        found = {name: signature(each) for name, each in self.named().items()}
        for name, parameter in self.named().items():
            for slot, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{slot}"] = signature(value)
        return found


@pytest.fixture
def job() -> Job:
    job = Job()
    job.step()
    return job


def test_slots_appear_with_the_first_update():
    job = Job()
    assert (len(job.view.parameters), len(job.view.slots)) == (4, 0)
    job.step()
    assert (len(job.view.parameters), len(job.view.slots)) == (4, 12)
    assert {name.rpartition(".")[2] for name in job.view.slots} == {"exp_avg", "exp_avg_sq", "step"}


def test_nothing_is_built_again_while_nothing_moves(job: Job):
    assert job.table.refresh() is True
    rows = job.view.rows
    job.step()
    assert job.table.refresh() is False
    assert all(row is rows[name] for name, row in job.view.rows.items())
    assert job.signed() == job.expected()


def _replaces_a_slot(job: Job) -> None:
    slots = job.optimizer.state[job.model[0].weight]
    slots["exp_avg"] = slots["exp_avg"] * 2


def _replaces_all_slots_of_a_parameter(job: Job) -> None:
    weight = job.model[0].weight
    job.optimizer.state[weight] = {key: each + 1 for key, each in job.optimizer.state[weight].items()}


def _loads_a_state_dict(job: Job) -> None:
    other = Job()
    other.step()
    other.step()
    job.optimizer.load_state_dict(other.optimizer.state_dict())


def _moves_a_parameter(job: Job) -> None:
    job.model[1].weight.data = torch.full_like(job.model[1].weight, 3.0)


def _resizes_a_storage(job: Job) -> None:
    storage = job.model[0].weight.untyped_storage()
    storage.resize_(1 << 20)
    job.model[0].weight.data.fill_(2.0)


def _adds_a_slot(job: Job) -> None:
    job.optimizer.state[job.model[0].bias]["average"] = torch.ones(2)


def _renames_a_slot(job: Job) -> None:
    slots = job.optimizer.state[job.model[0].bias]
    slots["average"] = slots.pop("exp_avg")


def _forgets_a_parameter(job: Job) -> None:
    del job.optimizer.state[job.model[0].bias]


@pytest.mark.parametrize(
    "change",
    [
        _replaces_a_slot,
        _replaces_all_slots_of_a_parameter,
        _loads_a_state_dict,
        _moves_a_parameter,
        _resizes_a_storage,
        _adds_a_slot,
        _renames_a_slot,
        _forgets_a_parameter,
    ],
)
def test_what_was_replaced_is_read_where_it_is_now(job: Job, change: Callable[[Job], None]):
    job.signed()
    change(job)
    assert job.table.refresh() is True
    assert job.signed() == job.expected()


def test_a_freed_storage_is_not_read(job: Job):
    job.signed()
    job.model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="the storage was freed"):
        job.signed()


def test_state_of_several_optimizers_has_one_table():
    job = Job()
    halves = [torch.optim.AdamW(each.parameters()) for each in job.model]
    view = StateTable(job.named(), halves).view()
    job.model(torch.ones(4, 3)).sum().backward()
    for optimizer in halves:
        optimizer.step()
    assert len(view.slots) == 4 * 3


def test_slots_that_are_no_tensors_and_slots_of_other_parameters_are_left_out():
    class Counting(torch.optim.SGD):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] |= {"step": 3, "history": [1], "sum": torch.ones(1)}

    job = Job(Counting)
    some = {name: each for name, each in job.named().items() if name != "model/0.weight"}
    view = StateTable(some, [job.optimizer]).view(some)
    job.step()
    assert {*view.slots} == {f"{name}.sum" for name in some}


def test_buffers_are_read_where_they_are_now():
    model = nn.BatchNorm1d(2)
    table = StateTable({}, modules=lambda: [("norm", model)])
    view = table.view()
    assert {name: row.kind for name, row in view.rows.items()} == dict.fromkeys(
        ("norm/running_mean", "norm/running_var", "norm/num_batches_tracked"), Kind.BUFFER
    )
    model.running_mean = torch.ones(2)
    assert view.rows["norm/running_mean"].tensor is model.running_mean
    assert table.refresh() is False


def test_a_tensor_has_one_name_and_what_nobody_has_named_gets_one():
    weight, more = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [more]}], momentum=0.9)
    view = StateTable({"b/weight": weight, "a/tied": weight}, [optimizer]).view()
    for each in (weight, more):
        each.grad = torch.ones(2)
    optimizer.step()
    unnamed = "optimizer.0/group.1.parameter.0"
    slots = {"a/tied.momentum_buffer", f"{unnamed}.momentum_buffer"}
    assert ({*view.parameters}, {*view.slots}) == ({"a/tied", unnamed}, slots)


def test_with_whom_a_tensor_is_equal(job: Job):
    compared, owned, neither = [*job.named()][:3]
    view = job.table.compare([compared])
    job.table.own([owned])
    assert {*view.rows} == {compared, *(f"{compared}.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step"))}
    job.table.ownership.learn([*view.rows], {f"{compared}.exp_avg": BY_DESIGN})
    expected = {
        compared: Equality.VOTED,
        f"{compared}.step": Equality.VOTED,
        f"{compared}.exp_avg": Equality.BY_DESIGN,
        owned: Equality.OWNED,
        f"{owned}.exp_avg": Equality.OWNED,
        neither: Equality.PRIVATE,
        "no/such.tensor": Equality.PRIVATE,
    }
    assert {name: job.table.equality(name) for name in expected} == expected


def test_parameters_that_are_not_chosen_are_not_looked_at(job: Job):
    view = job.table.view(())
    version = job.table.version
    job.model[1].weight.data = torch.full_like(job.model[1].weight, 3.0)
    assert (view.rows, job.table.version) == ({}, version)
