"""TorchTitan's own trainer on real ranks, with a small model, local data, and a check at every step."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import os
import random
import socket
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# First: TorchTitan expects an accelerator and a newer PyTorch.
if os.environ.get("TITAN_DEVICE", "cpu") == "cpu":
    from tests.support import titan_cpu as stand_ins
else:
    from tests.support import titan_cuda as stand_ins
from tests.support.findings import Findings, all_records, findings_of

# isort: split
import pytest
import torch
import torch.distributed as dist
import torchtitan
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan import trainer as titan_trainer
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from torchscout.adapters.registry import adapter_for
from torchscout.adapters.torchtitan import TorchTitanAdapter
from torchscout.attach import enable_resiliency
from torchscout.collectives.call import SCOUT_GROUP, Call
from torchscout.collectives.interceptor import listen
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.errors import ScoutError
from torchscout.faults.effects import FlipBit
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.log import log
from torchscout.mesh import LayerKind
from torchscout.session.session import Session

_NEW_HOST_NAME = 0x04000000  # from linux/sched.h
OVERRIDE = "torchscout.plugins.torchtitan.resiliency"


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
    faults: FaultPlan = field(default_factory=FaultPlan)
    log: Path | None = None
    """A file for what fired, where ranks may not live to tell."""
    replay: ReplayConfig | None = field(default_factory=lambda: ReplayConfig(interval=1))
    observer: ObserverConfig | None = None
    directory: Path | None = None
    """Of checkpoints."""
    overridden: Mapping[str, Any] | None = None
    """What is said to the override, if SCOUT comes in that way."""
    own: Path | None = None
    """Where TorchTitan writes checkpoints of its own, every three steps; nowhere unless said."""
    validated: bool = False
    """Whether there is a pass over other data after every other step."""
    kinds: bool = False
    """Whether norms have an optimizer of another kind than all else."""
    graphs: bool = False
    """Whether CUDA graphs are asked for; without CUDA they are none."""
    claimed: Mapping[str, Any] = field(default_factory=dict)
    """What the parallelism's config says while SCOUT attaches."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What else ``enable_resiliency`` is given."""
    spoiled: tuple[int, int, int] | None = None
    """A rank, a step and an optimizer, a slot of which has a wrong bit after the check of that step."""
    machine: int = 0
    """Ranks on a machine, each with a host name of its own; 0 leaves them where they are."""


@dataclass(frozen=True, slots=True)
class Outcome(Findings):
    """What one rank has to tell."""

    bits: dict[str, str]
    """A digest of each tensor that training leaves behind."""
    progress: dict[str, Any]
    groups: dict[str, tuple[int, ...]]
    """The framework's own, by the name of the axis."""
    along: dict[str, tuple[int, ...]]
    """The same, by the mesh."""
    resumed: int = 0
    """The step it went on from."""
    uneven: int = 0
    """How often this rank sent the others different numbers of rows."""

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
        (folder / each).mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {
        "bos_token": special[0],
        "eos_token": special[1],
        "add_bos_token": True,
        "add_eos_token": True,
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": each}) for each in texts))


def config_of(trial: Trial) -> Trainer.Config:
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
    config.dump_folder = str(trial.own or trial.assets / "titan")
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps = 2, 32, trial.steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", not trial.graphs
    config.checkpoint.enable, config.checkpoint.interval = trial.own is not None, 3
    config.validator.enable, config.validator.freq, config.validator.steps = trial.validated, 2, 1
    config.validator.dataloader = replace(config.dataloader, infinite=False)
    config.compile.enable = False
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
    if trial.kinds:
        (every,) = config.optimizer.param_groups
        norms = ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3})
        config.optimizer.param_groups = [norms, every]
    if trial.overridden is not None:
        config.override.imports = [(OVERRIDE, dict(trial.overridden))]
    return config


def answering(rank: int, questions: Iterator[tuple[Trial, Path | None]]) -> Iterator[Outcome]:
    for trial, folder in questions:
        yield train(rank, trial, folder)


def train(rank: int, trial: Trial, folder: Path | None) -> Outcome:
    """Through ``Trainer.train``; with SCOUT, where there is a folder for what it writes.

    A job that fails has not finished: nothing is put in order, and observers are to see that.
    """
    _begin(trial)
    trainer = config_of(trial).build()
    adapter = TorchTitanAdapter(trainer)
    last, rows = [*trainer.optimizers][-1], _Rows()
    with Injector(trial.faults, rank, adapter.model, last, log=trial.log) as injector, listen(rows):
        session = None if folder is None else _attach(trial, trainer, folder)
        resumed = trainer.step
        if trial.spoiled is not None and trial.spoiled[0] == rank:
            _spoil_after(trainer, *trial.spoiled[1:])
        trainer.train()
        if trial.overridden is not None and trainer.checkpointer.resumption is not None:
            resumed = trainer.checkpointer.resumption.step
    schedule = {**trainer.lr_schedulers.state_dict(), **trainer.lr_schedulers.get_metrics()}
    result = Outcome(
        bits_of(trainer),
        {**trainer.state_dict(), **schedule},
        *_groups(trainer, adapter),
        fired=len(injector.fired),
        resumed=resumed,
        uneven=rows.uneven,
        **({} if session is None else findings_of(session)),
    )
    _leave(trainer)
    return result


def attach_to_another_version(_rank: int, trial: Trial, removed: str | None) -> list[str]:
    """What is logged or raised if TorchTitan is newer than it is, and its Trainer lacks something."""
    _begin(trial)
    trainer = config_of(trial).build()
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchtitan, "__version__", "0.4.0")
        patch.setattr(log, "warning", lambda text, *values: seen.append(text % values))
        if removed is not None:
            patch.delattr(trainer if removed in vars(trainer) else Trainer, removed)
        try:
            assert adapter_for(trainer, None, None).obstacle is None
        except ScoutError as error:
            seen.append(str(error))
    _leave(trainer)
    return seen


class _Rows:
    """Hears how many rows this rank sends to each."""

    def __init__(self) -> None:
        self.uneven = 0

    def before(self, call: Call) -> None:
        self.uneven += call.splits is not None and len({*call.splits.sent}) > 1

    def issued(self, *_: Any) -> None: ...


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
    plain = local.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(plain.tobytes(), digest_size=8).hexdigest()


def _attach(trial: Trial, trainer: Trainer, folder: Path) -> Session:
    if trial.overridden is not None:
        return trainer.checkpointer.session
    parallelism = trainer.config.parallelism
    own = {name: getattr(parallelism, name) for name in trial.claimed}
    for name, value in trial.claimed.items():
        setattr(parallelism, name, value)
    kept = None if trial.directory is None else CheckpointConfig(trial.directory / "files")
    session = enable_resiliency(
        trainer,
        replay=all_records(trial.replay),
        observer=trial.observer,
        checkpoint=kept,
        run_dir=folder,
        **trial.given,
    )
    if kept is not None:
        session.resume()
    for name, value in own.items():
        setattr(parallelism, name, value)
    return session


def _spoil_after(trainer: Trainer, step: int, place: int) -> None:
    """As memory does it: PyTorch does not count it as a write."""
    steps = iter(range(1, step + 1))

    def spoil(*_: Any) -> None:
        if next(steps, None) == step:
            FlipBit(20).corrupt(next(iter([*trainer.optimizers][place].state.values()))["exp_avg"])

    trainer.optimizers.register_step_post_hook(spoil)  # after SCOUT's own, which came first


def _groups(
    trainer: Trainer, adapter: TorchTitanAdapter
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    rank, mesh = dist.get_rank(), adapter.mesh([""] * dist.get_world_size())
    axes = {
        "pp": ("pipeline", LayerKind.DENSE),
        "dp_replicate": ("replica", LayerKind.DENSE),
        "dp_shard": ("shard", LayerKind.DENSE),
        "cp": ("context", LayerKind.DENSE),
        "tp": ("tensor", LayerKind.DENSE),
        "ep": ("expert", LayerKind.EXPERT),
        "efsdp": ("shard", LayerKind.EXPERT),
    }
    if trainer.parallel_dims.cp == 1:
        axes["fsdp"] = ("shard", LayerKind.DENSE)
    theirs = {
        name: tuple(dist.get_process_group_ranks(devices.get_group()))
        for name, devices in trainer.parallel_dims.get_all_one_dimensional_meshes().items()
        if name in axes
    }
    return theirs, {name: mesh.ranks_along(axes[name][0], rank, axes[name][1]) for name in theirs}


def _begin(trial: Trial) -> None:
    stand_ins.prepare()
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan does where it starts the ranks' group
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("torchtitan").setLevel(logging.ERROR)
    # Rank 0 would sleep at the end of training until the others are done; here they wait for each other.
    titan_trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    if trial.directory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(trial.directory / "memory")
    if trial.machine:
        _move(f"machine-{dist.get_rank() // trial.machine}")


def _leave(trainer: Trainer) -> None:
    trainer.close()
    del trainer
    gc.enable()  # a trainer collects at times of its own
    gc.collect()
    # PyTorch names a group that only its members make after the number of groups they are in already: ranks
    # that were of different stages would not find each other in the next trial.
    for group in [*distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and group.group_desc != SCOUT_GROUP:
            dist.destroy_process_group(group)
    # What DTensor has worked out for a mesh it would take for the next one that is equal.
    _clear_sharding_prop_cache()


def _move(name: str) -> None:
    """To a machine of that name, as far as anybody can ask this process. Only for root, and for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME) != 0:
        raise OSError(ctypes.get_errno(), "a host name of one's own is not allowed here")
    socket.sethostname(name)
