"""A rank's state is complete: a job that resumes from it is bitwise the uninterrupted job."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.states import Job, all_bits, interrupted, seed, through_bytes
from torchscout.c3.signature import recorded, signature
from torchscout.errors import CheckpointError
from torchscout.state.collect import StateParts, collect, expected_bytes, require_storable
from torchscout.state.restore import Restored, require_as_saved, restore
from torchscout.state.table import Kind


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer, tied weights, a transient buffer, a channels-last convolution."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.convolution = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.frozen.weight if width != 8 else self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.dropout(self.norm(self.frozen(self.first(x))))
        image = self.convolution(x.view(-1, 2, 2, 2))
        return self.tied(x) + image.mean() + self.calls * 1e-3


class Odd(torch.optim.Optimizer):
    """Adafactor-like, and with state of every kind: numbers, None, lists, nested, shared, by other keys."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, torch.tensor(0.99)), "name": "odd"})

    @torch.no_grad()
    def step(self) -> None:
        self.state.setdefault("shared", torch.zeros(()))
        self.state["shared"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, row=None, past=[], deep={"a": ({"b": torch.zeros(1)}, None), 1: 2.5})
                    state.update(common=self.state["shared"], half=torch.zeros(3, dtype=torch.bfloat16))
                state["step"] += 1
                square = parameter.grad.square()
                state["row"] = square.mean(-1) if parameter.dim() > 1 else square
                state["past"] = [*state["past"], square.mean()][-3:]
                state["deep"]["a"][0]["b"] += sum(state["past"])
                state["half"] += 0.1
                rate = group["lr"] / (1 + state["deep"]["a"][0]["b"] + state["common"] + state["half"].sum())
                parameter.sub_(rate * parameter.grad * group["betas"][1] ** state["step"])


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [each for each in net.parameters() if each.requires_grad]


def job(make: Callable[[Any], Any], scheduled: bool = False) -> Callable[[], Job]:
    def made() -> Job:
        net = Net()
        optimizer = make(trained(net))
        registered = (
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)} if scheduled else {}
        )
        return Job(net, [optimizer], registered)

    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rprop": torch.optim.Rprop,
    "odd": Odd,
}


@pytest.mark.slow_except("amsgrad", "adafactor", "fused", "tensor lr", "odd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_job_is_bitwise_the_uninterrupted_one(name: str):
    for scheduled, at in ((False, 0), (True, 3)):
        whole, resumed = interrupted(job(OPTIMIZERS[name], scheduled), at=at)
        assert all_bits(resumed) == all_bits(whole)
        assert resumed.streams == whole.streams


def test_several_optimizers_and_pipeline_stages_are_kept_each():
    class Stages(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self:
                x = stage(x)
            return x

    def make() -> Job:
        stages = Stages([Net(), Net()])
        optimizers = [
            torch.optim.SGD(stages[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(
                [{"params": [stages[1].first.weight]}, {"params": [stages[1].first.bias], "lr": 0.5}]
            ),
        ]
        return Job(stages, optimizers)

    whole, resumed = interrupted(make)
    assert all_bits(resumed) == all_bits(whole)


def test_an_optimizers_own_copies_of_parameters_are_kept():
    """As mixed precision has them: what is updated is not what the model computes with."""

    class Mixed(Job):
        def step(self, number: int) -> None:
            super().step(number)
            with torch.no_grad():
                masters = self.optimizers[0].param_groups[0]["params"]
                for parameter, master in zip(self.model.parameters(), masters, strict=True):
                    master.grad = torch.full_like(master, number + 1.0)
                    parameter.copy_(master)

    def make() -> Job:
        model = nn.Linear(8, 8).bfloat16()
        model.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
        masters = [each.detach().float().requires_grad_() for each in model.parameters()]
        return Mixed(model, [torch.optim.AdamW(masters)])

    whole, resumed = interrupted(make)
    assert all_bits(resumed) == all_bits(whole)
    masters = [job.optimizers[0].param_groups[0]["params"][0] for job in (whole, resumed)]
    assert torch.equal(*masters)


class Loader:
    """Something that knows where it is."""

    def __init__(self) -> None:
        self.position: Any = (0, torch.zeros(2))

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


def test_registered_objects_and_a_gradient_scaler_come_back():
    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loader = Loader()
    loader.position = (3, torch.ones(2))
    registered = {"loader": loader, "scaler": scaler}
    kept = through_bytes(collect(StateParts(net, [], registered)))
    other, found = torch.amp.GradScaler("cpu", init_scale=2.0), Loader()
    restore(StateParts(Net(), [], {"loader": found, "scaler": other}), kept)
    assert other.get_scale() == 8.0
    epoch, seen = found.position
    assert (epoch, seen.tolist()) == (3, [1.0, 1.0])


def test_state_that_may_change_at_any_time_is_listed_apart_from_state_that_updates_change():
    net = nn.ModuleDict({"net": Net(), "lookup": nn.Embedding(3, 2, max_norm=1.0)})
    ours = job(OPTIMIZERS["tensor lr"])()
    ours.train(range(1))
    state = collect(StateParts(ours.model, ours.optimizers, {"loader": Loader()}))
    assert {state.rows[name].kind for name in state.live} == {Kind.PARAMETER, Kind.SLOT}
    assert {"first.weight", "first.weight.exp_avg", "frozen.weight"} <= state.live.keys()
    assert not [name for name in state.tensors if "tied" in name], "tied weights are kept once"
    prompt = {name.split("/")[0] for name in state.prompt}
    assert prompt == {"buffers", "caches", "optimizers", "registered", "rng"}
    state = collect(StateParts(net, [], {}))
    assert "lookup.weight" in state.prompt, "a forward pass scales these"
    assert state.bytes == sum(each.nbytes for each in state.tensors.values())


def test_gradients_are_not_part_of_the_state():
    ours = job(OPTIMIZERS["amsgrad"])()
    ours.train(range(1))
    before = through_bytes(ours.collect())
    for parameter in ours.model.parameters():
        parameter.grad = None
    assert str(through_bytes(ours.collect())) == str(before)


def tensors_of(ours: Job) -> list[torch.Tensor]:
    (optimizer,) = ours.optimizers
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    return [*ours.model.parameters(), *ours.model.buffers(), optimizer.param_groups[0]["lr"], *slots]


def test_existing_tensors_are_filled_in_place():
    ours = job(OPTIMIZERS["tensor lr"])()
    ours.train(range(2))
    kept, bits, held = through_bytes(ours.collect()), all_bits(ours), tensors_of(ours)
    ours.train(range(2, 5))
    ours.optimizers[0].param_groups[0]["lr"].fill_(7.0)
    ours.restore(kept)
    assert all(map(lambda one, other: one is other, held, tensors_of(ours)))
    assert all_bits(ours) == bits


def test_a_state_from_before_the_first_update_takes_optimizer_state_away_again():
    ours = job(OPTIMIZERS["momentum"])()
    kept = through_bytes(ours.collect())
    ours.train(range(2))
    assert ours.optimizers[0].state
    ours.restore(kept)
    assert not ours.optimizers[0].state


def test_a_passing_buffer_that_grew_or_is_made_later_comes_back_as_it_was():
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.zeros(2), persistent=False)
            self.register_buffer("later", None, persistent=False)

    net, other = Cached(), Cached()
    net.angles, net.later = torch.arange(5.0), torch.ones(3)
    restore(StateParts(other, [], {}), through_bytes(collect(StateParts(net, [], {}))))
    assert torch.equal(other.angles, net.angles)
    assert torch.equal(other.later, net.later)


WEIGHT = torch.arange(6.0).view(2, 3)
RECORDED = recorded(WEIGHT, signature(WEIGHT))
OF_A_DEVICE = f"fold:{'0' * 16}"


@pytest.mark.parametrize("known", [RECORDED, OF_A_DEVICE, None])
def test_a_tensor_that_holds_what_was_saved_is_accepted(known: str | None):
    saved, there = WEIGHT.clone(), WEIGHT.T.contiguous().T  # in another order in memory
    require_as_saved([Restored("w", there, saved)], {id(saved): known} if known else {})


@pytest.mark.parametrize(
    ("known", "wrong"),
    [(RECORDED, "both"), (RECORDED, "there"), (OF_A_DEVICE, "there"), (None, "there")],
)
def test_a_tensor_that_does_not_hold_what_was_saved_is_named(known: str | None, wrong: str):
    saved, there = WEIGHT.clone(), WEIGHT.clone()
    for each in (saved, there) if wrong == "both" else (there,):
        each[1, 2] = each[1, 2].nextafter(torch.tensor(9.0))
    restored = [Restored("right", WEIGHT, WEIGHT), Restored("parameter 'w'", there, saved)]
    with pytest.raises(CheckpointError, match=r"is not what was saved: parameter 'w'$"):
        require_as_saved(restored, {id(saved): known} if known else {})


def test_extra_state_of_modules_is_kept():
    class Counting(nn.Module):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    net, other = Counting(), Counting()
    net.count = 5
    restore(StateParts(other, [], {}), through_bytes(collect(StateParts(net, [], {}))))
    assert other.count == 5


def test_all_bits_of_numbers_stay():
    net = nn.Module()
    net.register_buffer(
        "odd", torch.tensor([0x7F800001, -1, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    )
    net.register_buffer("strided", torch.arange(6, dtype=torch.float64).view(2, 3).T)
    net.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    net.register_buffer("empty", torch.zeros(0, 3))
    kept = through_bytes(collect(StateParts(net, [], {})))
    expected = [each.clone() for each in net.buffers()]
    for each in net.buffers():
        each.zero_()
    restore(StateParts(net, [], {}), kept)
    assert net.odd.view(torch.int32).tolist() == [0x7F800001, -1, -(1 << 31)]
    assert all(map(torch.equal, [*net.buffers()][1:], expected[1:]))


def fitting() -> tuple[Job, Any]:
    ours = job(OPTIMIZERS["amsgrad"], scheduled=True)()
    ours.train(range(2))
    return ours, through_bytes(ours.collect())


def renamed(net: nn.Module) -> None:
    net.second = net.first
    del net.first


MISFITS: dict[str, tuple[Callable[[Job], None], str]] = {
    "shape": (lambda ours: setattr(ours.model, "norm", nn.BatchNorm1d(16)), r"norm.weight.*\(16,\).*\(8,\)"),
    "dtype": (lambda ours: ours.model.norm.double(), "norm.weight.*float64.*float32"),
    "buffer dtype": (
        lambda ours: setattr(ours.model.norm, "running_mean", torch.zeros(8).half()),
        "norm.running_mean.*float16.*float32",
    ),
    "name": (lambda ours: renamed(ours.model), "first.weight.*second.bias"),
    "another optimizer": (
        lambda ours: setattr(ours, "optimizers", [torch.optim.SGD(trained(ours.model), lr=0.1)]),
        "optimizer 0.*SGD.*AdamW",
    ),
    "fewer optimizers": (lambda ours: setattr(ours, "optimizers", []), "0 optimizers.* 1"),
    "other groups": (
        lambda ours: setattr(ours, "optimizers", [torch.optim.AdamW(trained(ours.model)[::-1])]),
        "groups of optimizer 0",
    ),
    "not registered": (lambda ours: setattr(ours, "registered", {}), "scheduler"),
    "not kept": (lambda ours: ours.registered.update(loader=Loader()), "loader"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(name: str):
    _, kept = fitting()
    seed(5)
    ours = job(OPTIMIZERS["amsgrad"], scheduled=True)()
    ours.train(range(1))
    change, message = MISFITS[name]
    change(ours)
    before, drawn = all_bits(ours), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        ours.restore(kept)
    assert all_bits(ours) == before
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_registered_object_that_refuses_leaves_everything_as_it_was():
    class Refusing(Loader):
        def load_state_dict(self, state: Any) -> None:
            if state == "poor":
                raise ZeroDivisionError("mine")

    class Giving(Refusing):
        def state_dict(self) -> Any:
            return "poor"

    ours, _ = fitting()
    ours.registered["loader"] = Giving()
    kept = through_bytes(ours.collect())
    ours.train(range(2, 4))
    ours.registered["loader"] = Refusing()
    before = all_bits(ours)
    with pytest.raises(ZeroDivisionError, match="mine"):
        ours.restore(kept)
    assert all_bits(ours) == before, "the scheduler, which had loaded, is put back"


def test_state_for_a_tensor_that_nobody_knows_is_refused():
    ours, _ = fitting()
    ours.optimizers[0].state[torch.zeros(3)] = {"a": 1}
    with pytest.raises(CheckpointError, match=r"has state for a tensor of shape \(3,\)"):
        ours.collect()


def test_what_cannot_be_kept_is_named_with_its_place():
    ours, _ = fitting()
    ours.registered["loader"] = loader = Loader()
    loader.position = {"file": object()}
    with pytest.raises(CheckpointError, match="registered/loader/file is a builtins"):
        ours.collect()


class Queue:
    def __init__(self, *items: Any) -> None:
        self.items = deque(items)

    def state_dict(self) -> Any:
        return {"items": self.items}

    def load_state_dict(self, state: Any) -> None:
        self.items = state["items"]


def test_state_that_cannot_be_kept_is_refused_when_it_is_registered():
    require_storable("queue", Queue(1, torch.ones(2).expand(3, 2)))
    with pytest.raises(
        ValueError, match=r"cannot store the state registered as 'queue': queue/items/1 is a builtins\.object"
    ):
        require_storable("queue", Queue(1, object()))


VIEWS = {
    "expanded": torch.arange(3.0).expand(2, 3),
    "expanded number": torch.tensor(5.0).expand(4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "every other": torch.arange(8.0)[::2],
    "sliding": torch.arange(5.0).unfold(0, 3, 1),
    "expanded transposed": torch.arange(6.0).view(2, 1, 3).expand(2, 4, 3).permute(2, 1, 0),
    "empty expanded": torch.empty(0, 1).expand(0, 3),
}


@pytest.mark.parametrize("name", VIEWS)
def test_expanded_and_strided_tensors_come_back(name: str):
    kept, loader = VIEWS[name], Loader()
    loader.position = {"queue": deque([kept], 2), "several": OrderedDict(a=[kept])}
    state = through_bytes(collect(StateParts(Net(), [], {"loader": loader})))
    found = Loader()
    restore(StateParts(Net(), [], {"loader": found}), state)
    again = found.position["queue"][0]
    assert torch.equal(again, kept)
    assert again is not kept
    assert again.stride() == kept.stride() or name in ("sliding", "empty expanded")
    assert (found.position["queue"].maxlen, type(found.position["several"])) == (2, OrderedDict)
    assert torch.equal(found.position["several"]["a"][0], kept)


def test_other_objects_are_not_accepted_as_a_state():
    with pytest.raises(CheckpointError, match="not a rank's state"):
        restore(StateParts(Net(), [], {}), {"weights": 1})


def test_the_expected_size_is_about_right_before_and_after_the_first_update():
    ours = job(torch.optim.AdamW)()
    before = expected_bytes(StateParts(ours.model, ours.optimizers))
    ours.train(range(1))
    after = expected_bytes(StateParts(ours.model, ours.optimizers))
    steps = 4 * len(trained(ours.model))
    assert after == before + steps
    rest = {"rng", "optimizers"}
    kept = sum(each.nbytes for name, each in ours.collect().tensors.items() if name.split("/")[0] not in rest)
    assert after == kept
