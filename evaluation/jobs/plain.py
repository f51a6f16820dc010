"""A program without a wrapper around its model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, train_on_text
from torchscout.config import Parallelism


def no_wrapper(job: Job) -> None:
    """Gradients are summed by parameter, and so after any start in the same order; DDP has another order in
    its first step.
    """
    model = GPT()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer, parallelism=Parallelism(replica=job.world))
    train_on_text(job, model, optimizer, job.rank)


JOBS: dict[str, Entry] = {"no-wrapper": Entry(no_wrapper)}
