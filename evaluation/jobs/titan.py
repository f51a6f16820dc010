"""Programs that TorchTitan's own trainer trains, with small models of it, in each of its parallelisms."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job, forget_groups


@dataclass(frozen=True)
class Setup:
    """What a user's config says of it."""

    parallelism: Mapping[str, Any] = field(default_factory=dict)
    """By the names of TorchTitan; all that is left over is FSDP's."""
    layers: int = 2
    is_mixture: bool = False
    accumulation: int = 1
    """Passes that go into one update."""
    chunked: bool = False
    """Whether the loss calls the output layer, piece by piece."""
    validated: bool = False
    """Whether there is a pass over other data after every other step."""
    kinds: bool = False
    """Whether norms have an optimizer of another kind than all else."""
    graphs: bool = False
    """Whether CUDA graphs are asked for; without CUDA they are none."""


def titan(job: Job, setup: Setup, layers: tuple[str, ...] = ()) -> None:
    """``layers`` are those that are slow on a slow rank, if not all."""
    prepare(job.device)
    train(job, config_of(setup).build(), layers)


def train(job: Job, trainer: Any, layers: tuple[str, ...] = ()) -> None:
    """Through ``Trainer.train``, whose steps are those of the job."""
    from torchscout.adapters.torchtitan import TorchTitanAdapter

    optimizers = [*trainer.optimizers]
    job.attach(
        trainer,
        None,
        parts=(trainer.model_parts, optimizers),
        also=lambda: [trainer.state_dict(), trainer.lr_schedulers.state_dict()],
        slow=(TorchTitanAdapter(trainer).model, optimizers[-1]),
        layers=layers,
    )
    train_step = trainer.train_step

    def step(batches: Any) -> None:
        job.begin(trainer.step)
        train_step(batches)
        job.end(trainer.step)

    trainer.train_step = step
    trainer.should_continue_training = lambda: trainer.step < job.last_step
    trainer.train()
    trainer.close()


def prepare(device: str = "cpu") -> None:
    """Let TorchTitan train on this rank, and forget an earlier trainer of it."""
    if device == "cpu":  # first: TorchTitan expects an accelerator and a newer PyTorch
        from evaluation.jobs import titan_cpu as stand_ins
    else:
        from evaluation.jobs import titan_cuda as stand_ins

        # TorchTitan makes the device of this number the current one; ranks may share a device.
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torchtitan import trainer

    stand_ins.prepare()
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan does where it starts the ranks' group
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("torchtitan").setLevel(logging.ERROR)
    # Rank 0 would sleep at the end of training until the others are done; here they wait for each other.
    trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    gc.enable()  # a trainer collects at times of its own
    gc.collect()
    forget_groups()
    # What DTensor has worked out for a mesh it would take for the next one that is equal.
    _clear_sharding_prop_cache()


def config_of(setup: Setup) -> Any:
    """What a user's config registry would return."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import ParamGroupConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = deepseek_v3_debugmodel() if setup.is_mixture else llama3_debugmodel()
    layers = config.model_spec.model.layers[: setup.layers]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.model.layers = layers
    if isinstance(config.loss, ChunkedLossWrapper.Config) and not setup.chunked:
        config.loss = config.loss.loss_fn
    folder = assets()
    config.hf_assets_path = str(folder / "tokenizer")
    config.dataloader.dataset_path = str(folder / "c4_test")
    config.dump_folder = str(folder / "titan")
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len = 2, 32
    training.steps = 1000  # the schedule is the same however many of them are trained
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", not setup.graphs
    config.checkpoint.enable = False
    config.validator.enable, config.validator.freq, config.validator.steps = setup.validated, 2, 1
    config.validator.dataloader = replace(config.dataloader, infinite=False)
    config.compile.enable = False
    config.metrics.log_freq = 1000
    config.debug.seed, config.debug.deterministic = 0, True
    parallelism.spmd_backend = "partial_dtensor"
    for name, value in setup.parallelism.items():
        setattr(parallelism, name, value)
    if setup.accumulation > 1:
        apart = (
            parallelism.tensor_parallel_degree
            * parallelism.pipeline_parallel_degree
            * parallelism.context_parallel_degree
        )
        rows = training.local_batch_size * setup.accumulation
        training.global_batch_size = rows * dist.get_world_size() // apart
    if setup.kinds:
        (every,) = config.optimizer.param_groups
        norms = ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3})
        config.optimizer.param_groups = [norms, every]
    return config


def assets() -> Path:
    """A folder with a tokenizer and a text to train on, which is made once and stays."""
    folder = Path(tempfile.gettempdir()) / f"torchscout-titan-{os.getuid()}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        make_assets(made)
        try:
            made.rename(folder)
        except OSError:  # another rank was first
            shutil.rmtree(made)
    return folder


def make_assets(folder: Path) -> None:
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
    settings = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True}
    settings_path = folder / "tokenizer" / "tokenizer_config.json"
    settings_path.write_text(json.dumps({**settings, "add_eos_token": True}))
    (folder / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": each}) for each in texts))


REPLICATE = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
HSDP = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
EXPERT_TENSOR = {"expert_parallel_degree": 4, **TENSOR}

_AGAIN = range(2, 200)
"""Activation checkpointing computes experts once more in backward."""
EXPERTS = "layers.1.moe.routed_experts.inner_experts"
_WRAPPED = "layers.1._checkpoint_wrapped_module"
_INSIDE = EXPERTS.replace("layers.1", _WRAPPED)
_PARTS = tuple(f"{each}/output" for each in ("tok_embeddings", "layers.0", "layers.1", "lm_head"))
_UPDATED = ("optimizer/param", "optimizer/reproduced")
_EXPERTS = (f"{EXPERTS}/output", f"{EXPERTS}/w1_EFD.grad", "all_to_all/captured.received", *_UPDATED)


def _entry(
    setup: Setup,
    named: tuple[int, ...] = (2,),
    *,
    at: str = "layers.1",
    more: tuple[str, ...] = ("state/owned",),
    compared: tuple[str, ...] | None = None,
    **settings: Any,
) -> Entry:
    """``named`` is who is named when rank 2 computes something wrong: of two peers both, since nothing says
    which is as it should be."""
    scope = "rank" if len(named) == 1 else "peer_group"
    calls = _AGAIN if setup.is_mixture else range(1, 200)
    wrong = Wrong(
        f"{at}/output", 2, f"{at.replace(_INSIDE, EXPERTS)}/output", calls, scope=scope, named=named
    )
    return Entry(
        **{
            "train": partial(titan, setup=setup),
            "ranks": 4,
            "flip": "reported",
            "compared": (*_PARTS, *_UPDATED, *more) if compared is None else compared,
            "unchecked": (),
            "wrong": {"output": wrong},
            "patience": 2,
            "needs": ("torchtitan",),
            **settings,
        }
    )


def _slow_in(mixture: Setup) -> Callable[[Job], None]:
    """A mixture as a whole exchanges tokens with other ranks, so that its parts are replayed."""
    parts = ("attention_norm", "attention", "ffn_norm", "moe.router", "moe.shared_experts")
    layers = ("layers.0", *(f"{_WRAPPED}.{each}" for each in parts))
    return partial(titan, setup=mixture, layers=layers)


_INTERLEAVED = Setup(INTERLEAVED, layers=4, kinds=True)
_OF_EXPERTS = Setup(EXPERT, is_mixture=True)
_OF_SLICED_EXPERTS = Setup(EXPERT_TENSOR, is_mixture=True)
JOBS: dict[str, Entry] = {
    "titan-replicate": _entry(Setup(REPLICATE), more=("state/parameters",), flip="named"),
    "titan-fsdp": _entry(Setup(), in_ci=("resumed",)),
    "titan-graphs": _entry(Setup(graphs=True)),
    "titan-rich": _entry(
        Setup(accumulation=2, chunked=True, validated=True, kinds=True),
        compared=("layers.1/output", *_UPDATED),
    ),
    "titan-hsdp": _entry(Setup(HSDP), more=("state/parameters",)),
    "titan-tensor": _entry(Setup(TENSOR), (0, 2), slow=(1, 3)),
    "titan-full-dtensor": _entry(Setup({"spmd_backend": "full_dtensor", **TENSOR}), (0, 2), slow=(1, 3)),
    "titan-context": _entry(Setup(CONTEXT), (0, 2), slow=(1, 3)),
    "titan-pipeline": _entry(
        Setup(PIPELINE, layers=4), (2, 3), at="layers.3", compared=_UPDATED, slow=(0, 1)
    ),
    "titan-interleaved": _entry(
        _INTERLEAVED,
        (2, 3),
        at="0.layers.2",
        compared=_UPDATED,
        slow=(0, 1),
        train=partial(titan, setup=_INTERLEAVED, layers=("0.layers.0", "1.layers.3")),
    ),
    "titan-expert": _entry(_OF_EXPERTS, (0, 2), at=_INSIDE, compared=_EXPERTS, train=_slow_in(_OF_EXPERTS)),
    "titan-pipeline-tensor": _entry(
        Setup({**PIPELINE, **TENSOR}), (0, 2), at="layers.0", compared=_UPDATED, ranks=8, slow=(1, 3)
    ),
    "titan-expert-tensor": _entry(
        _OF_SLICED_EXPERTS,
        (2, 6),
        at=_INSIDE,
        compared=_EXPERTS,
        ranks=8,
        train=_slow_in(_OF_SLICED_EXPERTS),
    ),
}
