"""A tiny Hugging Face model with random weights, trained by the real Trainer with our callback."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.support.checkpoint_jobs import kill
from tests.support.findings import Findings, all_records, findings_of
from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.plugins.huggingface import ResiliencyCallback
from torchscout.session.session import Session

VOCABULARY, LENGTH = 64, 16


@dataclass(frozen=True)
class Trial:
    """How to train."""

    steps: int = 6
    folder: Path | None = None
    """Of what the Trainer writes."""
    resumed: str | None = None
    """What the Trainer goes on from."""
    replay: ReplayConfig | None = field(default_factory=lambda: ReplayConfig(interval=1))
    observer: ObserverConfig | None = None
    faults: FaultPlan = field(default_factory=FaultPlan)
    killed: int | None = None
    """The step before which all ranks are killed."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the Trainer, besides."""
    writing: float = 0.0
    """Seconds that rank 0 takes for each checkpoint, and for each evaluation, besides."""


@dataclass(frozen=True)
class Result(Findings):
    """The result of one rank."""

    bits: dict[int, str]
    """All that training leaves behind on it, after each step."""
    resumed: int = 0

    @property
    def found(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        return [(e.manifestation.value, e.scope.value, e.ranks, e.step) for e in self.incidents]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """The same for everybody; samplers divide it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        drawn = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": drawn, "labels": drawn}


def answering(rank: int, questions: Iterator[tuple[Trial, Path | None]]) -> Iterator[Result]:
    for trial, run_dir in questions:
        yield train(rank, trial, run_dir)


def train(rank: int, trial: Trial, run_dir: Path | None) -> Result:
    """Without SCOUT where there is no folder for what it finds."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # As torchrun sets it; no connection is made, since there is a process group already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1"}
    GradientState._reset_state()  # which has the loader of the trial before, and its accumulation
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attention_dropout=0.1, **sizes)
    model = LlamaForCausalLM(config)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Injector(trial.faults, rank, model, optimizer) as injector:
        result = _trainer(trial, run_dir, model, optimizer)
    return replace(result, fired=len(injector.fired))


def _trainer(trial: Trial, run_dir: Path | None, model: Any, optimizer: torch.optim.Optimizer) -> Result:
    trainer = _Slowly(
        model,
        TrainingArguments(
            **{
                "output_dir": str(trial.folder or run_dir or tempfile.gettempdir()),
                "max_steps": trial.steps,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "save_strategy": "no" if trial.folder is None else "steps",
                "save_steps": 2,
                "logging_strategy": "no",
                "lr_scheduler_type": "cosine",
                "use_cpu": True,
                "ddp_backend": "gloo",
                "report_to": "none",
                "disable_tqdm": True,
                "seed": 3,
                **dict(trial.settings),
            }
        ),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        optimizers=(optimizer, None),
    )
    trainer.seconds = 0.0 if dist.get_rank() else trial.writing
    callback = None
    if run_dir is not None:
        settings = {"replay": all_records(trial.replay), "observer": trial.observer, "run_dir": run_dir}
        callback = ResiliencyCallback(trainer, **settings)
        trainer.add_callback(callback)
    last = _Last(trial.killed, optimizer, callback)
    trainer.add_callback(last)
    trainer.train(resume_from_checkpoint=trial.resumed)
    session = None if callback is None else callback.session
    result = result_of(last.bits, session, last.first - 1)
    result.status.update(last.status)  # of a session that was still open
    return result


class _Slowly(Trainer):
    """What is not a step of training takes its time."""

    seconds = 0.0

    def save_model(self, *given: Any, **named: Any) -> None:
        time.sleep(self.seconds)
        super().save_model(*given, **named)

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        time.sleep(self.seconds)
        return super().evaluate(*given, **named)


class _Last(TrainerCallback):
    """After every step, what it left behind; and an end before its time."""

    def __init__(self, killed: int | None, optimizer: torch.optim.Optimizer, callback: Any) -> None:
        self.killed, self.optimizer, self.callback = killed, optimizer, callback
        self.first, self.bits, self.status = 1, dict[int, str](), dict[str, Any]()

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.first = state.global_step + 1

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if self.killed == state.global_step + 1:
            dist.barrier()
            kill()

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any, lr_scheduler: Any, **___: Any) -> None:
        self.bits[state.global_step] = bits_of(model, self.optimizer, lr_scheduler.get_last_lr())
        if self.callback is not None:
            self.status.update(self.callback.session.status())


def result_of(bits: dict[int, str], session: Session | None, resumed: int) -> Result:
    return Result(bits) if session is None else Result(bits, resumed=resumed, **findings_of(session))


def bits_of(model: Any, optimizer: torch.optim.Optimizer, rates: list[float]) -> str:
    """Parameters, gradients, buffers, the optimizer's slots, the random stream and the learning rates."""
    tensors = [torch.get_rng_state(), *model.buffers()]
    for each in model.parameters():
        tensors += [each, *(slot for slot in optimizer.state[each].values() if torch.is_tensor(slot))]
    digest = hashlib.blake2b(repr(rates).encode(), digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
