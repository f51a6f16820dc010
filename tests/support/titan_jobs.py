"""TorchTitan's own trainer on real ranks, with a small model, local data, and a check at every step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import titan_cpu  # first: TorchTitan expects an accelerator

# isort: split
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.decision.record import EvidenceRecord, Incident
from torchscout.decision.recorder import read
from torchscout.faults.fault import Faults
from torchscout.faults.injector import Injector
from torchscout.integration.attach import enable_resiliency
from torchscout.integration.session import Session
from torchscout.integration.torchtitan import TorchTitanAdapter
from torchscout.mesh import Role

OVERRIDE = "torchscout.integration.torchtitan.resiliency"


@dataclass(frozen=True, slots=True)
class Trial:
    assets: Path
    """Where the tokenizer and the text are."""
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    """What the job's config says of it; all that is left over is FSDP's."""
    steps: int = 6
    layers: int = 2
    is_mixture: bool = False
    accumulation: int = 1
    """Passes that go into one update."""
    chunked: bool = False
    """Whether the loss calls the output layer, piece by piece."""
    faults: Faults = field(default_factory=Faults)
    replay: ReplayConfig | None = field(default_factory=lambda: ReplayConfig(interval=1))
    observer: ObserverConfig | None = None
    directory: Path | None = None
    """Of checkpoints."""
    overridden: Mapping[str, Any] | None = None
    """What is said to the override, if SCOUT comes in that way."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to tell."""

    bits: dict[str, str]
    """A digest of each tensor that training leaves behind."""
    progress: dict[str, Any]
    groups: dict[str, tuple[int, ...]]
    """The framework's own, by the name of the axis."""
    along: dict[str, tuple[int, ...]]
    """The same, by the mesh."""
    records: list[EvidenceRecord] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    fired: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    resumed: int = 0
    """The step it went on from."""

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.records if each.verdict is not None and each.verdict.agrees}

    @property
    def unchecked(self) -> dict[str, str | None]:
        return {each.surface: each.reason for each in self.records if each.verdict is None}

    @property
    def found(self) -> set[tuple[str, str, tuple[int, ...]]]:
        return {(each.manifestation.value, each.scope.value, each.ranks) for each in self.incidents}


def make_assets(folder: Path) -> None:
    """A tokenizer and a text to train on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    texts = [" ".join(draw.choice(words) for _ in range(draw.randint(40, 200))) for _ in range(200)]
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    for each in ("tokenizer", "c4_test"):
        (folder / each).mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {
        "bos_token": special[0],
        "eos_token": special[1],
        "add_bos_token": True,
        "add_eos_token": True,
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": each}) for each in texts))


def config_of(trial: Trial, folder: Path) -> Trainer.Config:
    """What a user's config registry would return."""
    config = deepseek_v3_debugmodel() if trial.is_mixture else llama3_debugmodel()
    layers = config.model_spec.model.layers[: trial.layers]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.model.layers = layers
    if isinstance(config.loss, ChunkedLossWrapper.Config) and not trial.chunked:
        config.loss = config.loss.loss_fn
    config.hf_assets_path = str(trial.assets / "tokenizer")
    config.dataloader.dataset_path = str(trial.assets / "c4_test")
    config.dump_folder = str(folder / "titan")
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps = 2, 32, trial.steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    config.validator.enable = config.checkpoint.enable = config.compile.enable = False
    config.metrics.log_freq = 100
    config.debug.seed, config.debug.deterministic = 0, True
    parallelism.spmd_backend = "partial_dtensor"
    for name, value in trial.parallelism.items():
        setattr(parallelism, name, value)
    if trial.accumulation > 1:
        ranks = dist.get_world_size()
        apart = (
            parallelism.tensor_parallel_degree
            * parallelism.pipeline_parallel_degree
            * parallelism.context_parallel_degree
        )
        training.global_batch_size = training.local_batch_size * trial.accumulation * ranks // apart
    if trial.overridden is not None:
        config.override.imports = [(OVERRIDE, dict(trial.overridden))]
    return config


def train(rank: int, trial: Trial, folder: Path, attached: bool = True) -> Told:
    """Through ``Trainer.train``; ``folder`` is this run's."""
    _begin()
    if trial.directory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(trial.directory / "memory")
    trainer = config_of(trial, folder).build()
    adapter = TorchTitanAdapter(trainer)
    with Injector(trial.faults, rank, adapter.model, [*trainer.optimizers][-1]) as injector:
        session = _attach(trial, trainer, folder) if attached else None
        resumed = trainer.step
        trainer.train()
        if trial.overridden is not None and trainer.checkpointer.resumption is not None:
            resumed = trainer.checkpointer.resumption.step
    told = Told(
        bits_of(trainer),
        {**trainer.state_dict(), **trainer.lr_schedulers.state_dict(), **trainer.lr_schedulers.get_metrics()},
        *_groups(trainer, adapter),
        fired=len(injector.fired),
        resumed=resumed,
    )
    if session is None:
        trainer.close()
        return told
    told.incidents.extend(session.incidents)
    told.status.update(session.status())
    session.close()
    trainer.close()
    told.failures.extend(session.failures)
    lines = read(session.run_dir / "records" / f"rank-{rank}.jsonl") if trial.replay is not None else ()
    told.records.extend(line.item for line in lines if isinstance(line.item, EvidenceRecord))
    return told


def with_and_without(rank: int, trial: Trial, folder: Path) -> tuple[bool, Told]:
    """Whether training is bitwise the same as without SCOUT."""
    alone = train(rank, trial, folder / "alone", False)
    checked = train(rank, trial, folder / "checked")
    return (alone.bits, alone.progress) == (checked.bits, checked.progress), checked


def refusal(rank: int, trial: Trial, changes: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What attaching says, with these changes to the config and this beside the trainer."""
    _begin()
    trainer = config_of(trial, trial.assets / "unused").build()
    for path, value in changes.items():
        part, _, name = path.partition(".")
        setattr(getattr(trainer.config, part), name, value)
    try:
        enable_resiliency(trainer, **given)
    except ValueError as error:
        return str(error)
    return "attached"


def bits_of(trainer: Trainer) -> dict[str, str]:
    """All that training leaves behind on this rank."""
    tensors: dict[str, torch.Tensor] = {"random": torch.get_rng_state()}
    for place, part in enumerate(trainer.model_parts):
        named = [*part.named_parameters(), *part.named_buffers()]
        tensors |= {f"{place}.{name}": each for name, each in named}
        tensors |= {f"{place}.{name}.grad": each.grad for name, each in named if each.grad is not None}
    for place, optimizer in enumerate(trainer.optimizers):
        for number, slots in enumerate(optimizer.state.values()):
            tensors |= {f"optimizer {place}.{number}.{name}": each for name, each in slots.items()}
    return {name: _digest(each) for name, each in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = local.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(plain.tobytes(), digest_size=8).hexdigest()


def _attach(trial: Trial, trainer: Trainer, folder: Path) -> Session:
    if trial.overridden is not None:
        return trainer.checkpointer.session
    kept = None if trial.directory is None else CheckpointConfig(trial.directory / "files")
    session = enable_resiliency(
        trainer, replay=trial.replay, observer=trial.observer, checkpoint=kept, run_dir=folder / "scout"
    )
    if kept is not None:
        session.resume()
    return session


def _groups(
    trainer: Trainer, adapter: TorchTitanAdapter
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    rank, mesh = dist.get_rank(), adapter.mesh([""] * dist.get_world_size())
    axes = {
        "pp": ("pipeline", Role.DENSE),
        "dp_replicate": ("replica", Role.DENSE),
        "cp": ("context", Role.DENSE),
        "tp": ("tensor", Role.DENSE),
        "ep": ("expert", Role.EXPERT),
        "efsdp": ("shard", Role.EXPERT),
    }
    if trainer.parallel_dims.cp == 1:
        axes["fsdp"] = ("shard", Role.DENSE)
    theirs = {
        name: tuple(dist.get_process_group_ranks(devices.get_group()))
        for name, devices in trainer.parallel_dims.get_all_one_dimensional_meshes().items()
        if name in axes
    }
    return theirs, {name: mesh.ranks_along(axes[name][0], rank, axes[name][1]) for name in theirs}


def _begin() -> None:
    titan_cpu.prepare()
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan does where it starts the ranks' group
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("torchtitan").setLevel(logging.ERROR)
