"""Programs that a framework trains: Hugging Face with and without its Trainer, Lightning and its Fabric,
DeepSpeed, Megatron-Core.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LENGTH, next_token_loss, text


def huggingface_loop(job: Job) -> None:
    """A causal language model in a loop of one's own, under DDP."""
    model = DistributedDataParallel(_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)
    job.attach(model, optimizer, states={"schedule": schedule})
    for step in job.steps():
        tokens, _ = text(step, job.rank)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def accelerate_loop(job: Job) -> None:
    from accelerate import Accelerator

    _as_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _llama()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, wrapped = accelerator.prepare(net, optimizer)
    job.attach(model, wrapped, slow=(net, optimizer))
    for step in job.steps():
        for part in range(2):
            tokens, _ = text(step, job.rank, part)
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A dataset that is the same on all ranks; the Trainer's sampler divides it."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 48, (LENGTH,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": row, "labels": row}


def huggingface_trainer(job: Job) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    _as_torchrun()
    net = _llama()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            job.attach(trainer.model_wrapped, optimizer)

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            job.begin(state.global_step + 1)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            job.end(state.global_step)

    settings = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=job.last_step,
        per_device_train_batch_size=4,
        save_strategy="no",
        logging_strategy="no",
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(net, settings, train_dataset=Rows(), optimizers=(optimizer, None), callbacks=[Steps()])
    trainer.train()


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as printing

    printing.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _as_torchrun() -> None:
    """Set the variables of torchrun; no connection is made, since there is a process group already."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1"}


def lightning_trainer(job: Job) -> None:
    """Automatic optimization: Lightning gives the optimizer a closure that runs forward and backward."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            tokens = batch["input_ids"]
            return next_token_loss(self.net(tokens[:, :-1]), tokens[:, 1:])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Steps(Callback):
        def on_train_start(self, trainer: Any, _: Any) -> None:
            job.attach(trainer.model, trainer.optimizers[0])

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            job.begin(trainer.global_step + 1)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            job.end(trainer.global_step)

    trainer = Trainer(
        strategy=DDPStrategy(cluster_environment=_lightning_environment(job)),
        accelerator="cpu",
        devices=job.world,
        max_steps=job.last_step,
        gradient_clip_val=1.0,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(), torch.utils.data.DataLoader(Rows(), batch_size=4))


def fabric_loop(job: Job) -> None:
    """Fabric's wrappers around a model, its optimizer and the backward pass."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(cluster_environment=_lightning_environment(job))
    fabric = Fabric(accelerator="cpu", devices=job.world, strategy=strategy)
    fabric.launch()
    net = GPT()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    job.attach(model, optimizer, slow=(net, optimizer))
    for step in job.steps():
        tokens, targets = text(step, job.rank)
        optimizer.zero_grad()
        fabric.backward(next_token_loss(model(tokens), targets))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()


def _lightning_environment(job: Job) -> Any:
    """Return the environment of torchrun on one machine."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    logging.getLogger("lightning").setLevel(logging.ERROR)
    _as_torchrun()
    os.environ |= {"LOCAL_WORLD_SIZE": str(job.world), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "clients"}
    return TorchElasticEnvironment()


def deepspeed_zero(job: Job, stage: int, *, offloads: bool = False) -> None:
    from tests.support.checkpoint_jobs import Loader
    from tests.support.deepspeed_jobs import Boundary, Plan, bits_of, work_of
    from tests.support.deepspeed_layouts import offloaded

    work = work_of(offloaded(stage) if offloads else Plan(stage=stage), job.rank)
    engine, loader = work.engine, Loader(work.replica)
    job.attach(
        engine,
        None,
        states={"loader": loader},
        also=lambda: [bits_of(engine, loader)],
        weight=lambda: _held(engine.module),
        slow=(engine.module, Boundary(engine)),
    )
    for _, batches in _fed(job, loader):
        work.step(batches, lambda: None)


def _held(model: torch.nn.Module) -> torch.Tensor:
    """Return a weight, or this rank's part of it."""
    each_one = (getattr(each, "ds_tensor", each) for each in model.parameters())
    return next(each for each in each_one if each.numel() > 16)


def megatron(job: Job, *, sharded: bool, instances: int = 1) -> None:
    from tests.support.megatron_jobs import state_of
    from tests.support.megatron_models import Trial, build, called, inner, one_step

    built = build(Trial(sharded=sharded, instances=instances))
    torch.manual_seed(7)
    job.attach(
        built.chunks[0],
        built.optimizer,
        states={"schedule": built.schedule, "loader": built.loader},
        also=lambda: [state_of(built)],
        weight=lambda: next(each for each in called(built).parameters() if each.ndim > 1),
        slow=(called(built), inner(built)[0]),
    )
    for _ in job.steps():
        one_step(built)


def _fed(job: Job, loader: Any) -> Iterator[tuple[int, Any]]:
    source = iter(loader)
    for step in job.steps():
        yield step, next(source)


JOBS: dict[str, Entry] = {
    "huggingface": Entry(huggingface_loop, needs=("transformers",)),
    "huggingface-trainer": Entry(
        huggingface_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("transformers", "accelerate"),
    ),
    "accelerate": Entry(accelerate_loop, needs=("transformers", "accelerate")),
    "lightning": Entry(
        lightning_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("lightning",),
    ),
    "lightning-fabric": Entry(fabric_loop, patience=2, needs=("lightning",)),
    "deepspeed-zero1": Entry(partial(deepspeed_zero, stage=1), patience=2, needs=("deepspeed",)),
    "deepspeed-zero3": Entry(
        partial(deepspeed_zero, stage=3), flip="reported", patience=2, needs=("deepspeed",)
    ),
    "deepspeed-zero2-offload": Entry(
        partial(deepspeed_zero, stage=2, offloads=True), patience=2, needs=("deepspeed",)
    ),
    "megatron": Entry(partial(megatron, sharded=False), patience=2, needs=("megatron",)),
    "megatron-distributed-optimizer": Entry(partial(megatron, sharded=True), patience=2, needs=("megatron",)),
    "megatron-two-instances": Entry(
        partial(megatron, sharded=True, instances=2),
        ranks=4,
        flip="reported",
        patience=2,
        needs=("megatron",),
    ),
}
