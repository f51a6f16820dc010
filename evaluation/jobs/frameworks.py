"""Programs that a framework trains: Hugging Face with and without its Trainer, Lightning and its Fabric."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LENGTH, next_token_loss, text


def huggingface_loop(job: Job, *, cached: bool = False) -> None:
    """A causal language model in a loop of one's own, under DDP. ``cached``: it keeps keys and values for
    generating text, as it does if nobody tells it otherwise.
    """
    net = _llama()
    net.config.use_cache = cached
    model = DistributedDataParallel(net)
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


def huggingface_trainer(job: Job, *, recomputes: bool = False, family: str = "llama") -> None:
    from accelerate.state import GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    _as_torchrun()
    GradientState._reset_state()  # which has the loader of an earlier training, and its accumulation
    net = _llama() if family == "llama" else _gpt2()
    if recomputes:
        net.gradient_checkpointing_enable({"use_reentrant": False})
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
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
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


def _gpt2() -> Any:
    """Its embedding and its head share their weight."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as printing

    printing.set_verbosity_error()
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, use_cache=False, **sizes))


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


_STATE = ("state/parameters", "state/optimizer", "optimizer/reproduced")
_LLAMA = (*_STATE, *(f"model.{part}/output" for part in ("embed_tokens", "layers.0", "layers.1")))
_GPT2 = (*_STATE, *(f"transformer.{part}/output" for part in ("wte", "h.0", "h.1")))
_OUTPUT = {"output": Wrong("model.layers.1/output", 1, calls=range(2, 400))}
"""Training's own passes are two in a step."""
_TRAINER: dict[str, Any] = {
    "patience": 2,
    "not_resumed": "goes on from the Trainer's own checkpoints",
    "needs": ("transformers", "accelerate"),
}
JOBS: dict[str, Entry] = {
    "huggingface": Entry(huggingface_loop, compared=_LLAMA, unchecked=(), needs=("transformers",)),
    "huggingface-cached": Entry(
        partial(huggingface_loop, cached=True),
        unchecked=("model.layers*",),
        not_slowed="its layers are not replayed",
        needs=("transformers",),
    ),
    "huggingface-trainer": Entry(
        huggingface_trainer,
        compared=_LLAMA,
        unchecked=(),
        wrong=_OUTPUT,
        **_TRAINER,
    ),
    "huggingface-trainer-recomputing": Entry(
        partial(huggingface_trainer, recomputes=True), compared=_LLAMA, unchecked=(), **_TRAINER
    ),
    "huggingface-trainer-gpt2": Entry(
        partial(huggingface_trainer, family="gpt2"), compared=_GPT2, unchecked=(), **_TRAINER
    ),
    "accelerate": Entry(
        accelerate_loop,
        compared=_LLAMA,
        unchecked=(),
        wrong=_OUTPUT,
        needs=("transformers", "accelerate"),
    ),
    "lightning": Entry(
        lightning_trainer,
        patience=2,
        not_resumed="goes on from the Trainer's own checkpoints",
        needs=("lightning",),
    ),
    "lightning-fabric": Entry(fabric_loop, patience=2, needs=("lightning",)),
}
