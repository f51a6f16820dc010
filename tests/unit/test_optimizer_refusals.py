"""Updates that are not replayed, each with its reason."""

from __future__ import annotations

import pytest
import torch

from tests.support.update_job import Job, Rank
from torchscout.errors import ReplayError


def adamw(parameters):
    return torch.optim.AdamW(parameters.values(), lr=0.01)


def refused(job: Job, step, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        job.replay(step=step)


def test_a_step_without_an_optimizer_step_is_refused():
    refused(Job(adamw), lambda _: None, "the optimizer did not step layer.0/weight")


def test_a_missing_gradient_is_refused():
    refused(Job(adamw), lambda rank: rank.optimizer.step(), "layer.0/weight had no gradient")


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_refused(by_name):
    def step(rank):
        rank.backward()
        closure = torch.enable_grad()(lambda: torch.zeros(()))
        rank.optimizer.step(closure=closure) if by_name else rank.optimizer.step(closure)

    refused(Job(adamw), step, "closure")


def test_a_sparse_gradient_is_refused():
    def step(rank):
        parameter = rank.parameters["layer.0/weight"]
        parameter.grad = torch.eye(*parameter.shape).to_sparse()
        rank.optimizer.step()

    job = Job(lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1))
    refused(job, step, "sparse")


@pytest.mark.parametrize(
    ("setting", "value"), [("lr", 0.02), ("betas", (0.9, 0.99)), ("foreach", True), ("maximize", True)]
)
def test_a_setting_that_differs_between_peers_is_refused(setting, value):
    job = Job(adamw)
    job.ranks[2].optimizer.param_groups[0][setting] = value
    refused(job, Rank.step, f"setting 'group {setting}' differs: .* on peer 2")


def test_optimizers_of_different_classes_are_refused():
    job = Job(adamw)
    other = Rank([(33, 67)], lambda parameters: torch.optim.Adam(parameters.values(), lr=0.01), torch.float32)
    job.ranks[1] = other
    refused(job, Rank.step, "class 'of the optimizer' differs: .*adam.Adam on peer 1, .*AdamW on the")


def test_different_slices_are_refused():
    job = Job(adamw, shapes=[(100_000,)])
    job.ranks[1].recipe.begin(0, is_source=False).release()
    refused(job, Rank.step, r"slice 'layer.0/weight' differs: \[65536, 100000, False\] on peer 1")


def test_different_optimizer_state_is_refused():
    job = Job(adamw)
    job.ranks[1].step()
    refused(job, Rank.step, "'state exp_avg' differs: .* on peer 1, None on the source")
