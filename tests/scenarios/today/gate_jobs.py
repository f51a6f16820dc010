"""Runs the training scripts of ``test_gate`` on Gloo ranks, resumes in a second session, and tells what was
loaded.

A check comes after every second step. Each script is an ordinary one that does something with the weights
besides training them.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchscout import CheckpointConfig, ReplayConfig, enable_resiliency
from torchscout.errors import CheckpointError

RANKS, LAST_CHECK = 2, 4
VALIDATION_SECONDS = 2.0
"""Time enough for a capture of this small model, which takes milliseconds."""

Loaded = tuple[int, str | None, str]


def loaded_after(scripts: Sequence[str], folder: Path) -> list[Loaded | str]:
    """What a second job loads after each script: the step, how far it is trusted, and which weights."""
    answers = run_ranks(_one_after_the_other, RANKS, folder, scripts, timeout=60)
    assert all(each == answers[0] for each in answers), "ranks load different states"
    return answers[0]


def _one_after_the_other(rank: int, folder: Path, scripts: Sequence[str]) -> list[Loaded | str]:
    return [_run(rank, folder / str(number), script) for number, script in enumerate(scripts)]


def _run(rank: int, folder: Path, script: str) -> Loaded | str:
    os.environ["TORCHSCOUT_MEMORY"] = str(folder / "memory")
    first = SCRIPTS[script](rank, folder)
    with suppress(InterruptedError):
        first.run()
    assert first.has_changed_something
    assert (first.session.failures, first.session.incidents) == ([], [])
    dist.barrier()
    second = SCRIPTS[script](rank, folder)
    with second.session:
        try:
            resumed = second.session.resume()
        except CheckpointError:
            return "no checkpoint fits the model"
    dist.barrier()
    weights = first.known.get(resumed.step, {}).get(second.state(), "as they never were")
    return resumed.step, resumed.role and resumed.role.value, weights


class Net(nn.Module):
    """A model that is trained, one that may follow it, and room for an average."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("average", torch.zeros(8, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.online(values) - self.target(values)


class Script:
    steps = LAST_CHECK + 1

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.known: dict[int, dict[str, str]] = {}
        """For each step, the states that there were until the next one, and which of them each was."""
        self.has_changed_something = False
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Net())
        self.weights = [*self.model.module.online.parameters()]
        self.optimizer = torch.optim.AdamW(self.optimized(), lr=1e-2)
        self.session = enable_resiliency(
            self.model,
            self.optimizer,
            replay=ReplayConfig(interval=2),
            observer=None,
            checkpoint=CheckpointConfig(folder / "checkpoints", persist_every=1),
            run_dir=folder / "run",
        )

    def run(self) -> None:
        with self.session:
            self.session.resume()
            for step in range(1, self.steps + 1):
                self.note(step - 1, "as the next step found them")
                self.optimizer.zero_grad()
                self.loss(step).backward()
                self.optimizer.step()
                self.note(step, "as the check saw them")
                self.after_update(step)
                self.look(step)
            self.at_the_end()

    def optimized(self) -> list[nn.Parameter]:
        return self.weights

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        return self.model(torch.randn(4, 8, generator=generator)).square().mean()

    def after_update(self, step: int) -> None:
        pass

    def at_the_end(self) -> None:
        """Called before the session is closed."""

    def look(self, step: int) -> None:
        self.has_changed_something |= self.state() not in self.known[step]

    def note(self, step: int, which: str) -> None:
        """Remember the weights and the learning rate. Of several names for a state the latest counts."""
        self.known.setdefault(step, {})[self.state()] = which

    def state(self) -> str:
        digest = hashlib.blake2b(repr(self.optimizer.param_groups[0]["lr"]).encode(), digest_size=8)
        for each in (*self.model.parameters(), *self.model.buffers()):
            digest.update(each.detach().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def put(self, values: Sequence[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def average(self) -> list[torch.Tensor]:
        """Stands for a moving average of the weights."""
        return [each.detach() / 2 for each in self.weights]


# Scripts whose last step has a check, so that no update follows it.


class Ends(Script):
    steps = LAST_CHECK

    def at_the_end(self) -> None:
        try:
            self.change()
        finally:
            self.look(self.steps)
            self.note(self.steps, "as the script left them")

    def change(self) -> None:
        raise NotImplementedError


class LoadsAverage(Ends):
    def change(self) -> None:
        self.put(self.average())


class SetsToZero(Ends):
    def change(self) -> None:
        for each in self.weights:
            nn.init.zeros_(each)


class FailsInSwap(Ends):
    def change(self) -> None:
        self.put(self.average())
        raise InterruptedError("an evaluation fails, and nobody puts the trained weights back")


class CastsToHalf(Ends):
    def change(self) -> None:
        self.model.half()


# Scripts that go on after the last check.


class Validates(Script):
    """With averaged weights."""

    def after_update(self, step: int) -> None:
        if step == LAST_CHECK:
            trained = [each.detach().clone() for each in self.weights]
            self.put(self.average())
            self.look(step)
            self.note(step, "as the validation found them")
            self.validate(self.batches())
            self.put(trained)

    def batches(self) -> Iterable[torch.Tensor]:
        return [torch.ones(4, 8)] * 2

    def validate(self, batches: Iterable[torch.Tensor]) -> None:
        self.model.eval()
        with torch.no_grad():
            for each in batches:
                self.model(each)
        self.model.train()
        # A validation takes its time. If a capture has begun, it is over then.
        pattern = f"*/step-{LAST_CHECK:010d}.*/rank-{self.rank}-of-*.shard"
        deadline = time.monotonic() + VALIDATION_SECONDS
        while not [*(self.folder / "memory").glob(pattern)] and time.monotonic() < deadline:
            time.sleep(0.01)


class ValidatesFromWatchedLoader(Validates):
    def batches(self) -> Iterable[torch.Tensor]:
        return self.session.watch_input(super().batches())


class LowersTheRate(ValidatesFromWatchedLoader):
    """With the trained weights; as ``ReduceLROnPlateau`` does it."""

    def after_update(self, step: int) -> None:
        if step == LAST_CHECK:
            self.validate(self.batches())
            self.optimizer.param_groups[0]["lr"] /= 2


class ValidatesInTrainingMode(Validates):
    """The first call looks as if the next step began, so that the capture begins with the averages."""

    def validate(self, batches: Iterable[torch.Tensor]) -> None:
        for each in batches:
            self.model(each)


class ExchangesMemory(ValidatesInTrainingMode):
    """The memory with the averages is not written to again, whatever has been copied from it."""

    def put(self, values: Sequence[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.data = value


class ValidatesHalf(Validates):
    """In half precision, so that the weights stay rounded."""

    def after_update(self, step: int) -> None:
        if step == LAST_CHECK:
            self.model.half()
            self.validate(each.half() for each in self.batches())
            self.model.float()


class GoesBack(Script):
    """To the weights of the first step, as if they had been the best."""

    def after_update(self, step: int) -> None:
        if step == 1:
            self.best = copy.deepcopy(self.model.state_dict())
        elif step == LAST_CHECK:
            self.model.load_state_dict(self.best)


class CallsTeacher(Script):
    """The model itself, with averaged weights, is called at the beginning of each step."""

    def loss(self, step: int) -> torch.Tensor:
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        average = dict(zip(names, self.average(), strict=True))
        taught = torch.func.functional_call(self.model, average, torch.ones(4, 8))
        self.has_changed_something = True
        return super().loss(step) + taught.detach().mean()


class AveragesInBuffer(Script):
    @torch.no_grad()
    def after_update(self, _: int) -> None:
        self.model.module.average.lerp_(self.weights[0], 0.5)


class Clips(Script):
    @torch.no_grad()
    def after_update(self, _: int) -> None:
        for each in self.weights:
            each.clamp_(-0.05, 0.05)


class ScalesData(Script):
    def after_update(self, _: int) -> None:
        for each in self.weights:
            each.data.mul_(0.9)


class TargetFollows(Script):
    @torch.no_grad()
    def after_update(self, _: int) -> None:
        for mine, each in zip(self.model.module.target.parameters(), self.weights, strict=True):
            mine.lerp_(each, 0.5)


class SecondOptimizer(Script):
    """Torchscout knows only the first."""

    def optimized(self) -> list[nn.Parameter]:
        self.second = torch.optim.SGD(self.weights[2:], lr=0.1)
        return self.weights[:2]

    def after_update(self, _: int) -> None:
        self.second.step()
        self.second.zero_grad()


class NotANumber(Script):
    def loss(self, step: int) -> torch.Tensor:
        return super().loss(step) * (math.nan if step == LAST_CHECK else 1.0)

    def after_update(self, step: int) -> None:
        if step == LAST_CHECK:
            assert all(bool(each.isnan().all()) for each in self.weights)
            self.has_changed_something = True


class WritesNotANumber(Script):
    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if step == LAST_CHECK:
            self.weights[0][0] = math.nan


SCRIPTS: dict[str, type[Script]] = {
    "loads averaged weights, and closes": LoadsAverage,
    "sets all weights to zero, and closes": SetsToZero,
    "fails in an evaluation of averaged weights": FailsInSwap,
    "casts the model to half precision, and closes": CastsToHalf,
    "validates averaged weights": Validates,
    "validates averaged weights with a watched loader": ValidatesFromWatchedLoader,
    "lowers the rate after a validation with a watched loader": LowersTheRate,
    "validates averaged weights in training mode": ValidatesInTrainingMode,
    "the same, and exchanges the memory of the weights": ExchangesMemory,
    "validates in half precision": ValidatesHalf,
    "goes back to the best weights": GoesBack,
    "calls the model with averaged weights in each step": CallsTeacher,
    "clips the weights after each update": Clips,
    "scales the weights through .data after each update": ScalesData,
    "lets a target network follow after each update": TargetFollows,
    "keeps an average in a buffer after each update": AveragesInBuffer,
    "steps a second optimizer after each update": SecondOptimizer,
    "has a loss that is not a number": NotANumber,
    "writes to a weight what is not a number": WritesNotANumber,
}
