"""What a check by replay costs: against the layer it replays, and against training.

    python benchmarks/replay.py [--part NAME ...] [--json] [--output FILE]

The paper's estimate is the reference: replaying V variants of one of N layers every I steps costs V times the
layer's own forward and backward, or V / (I x N) of training. Every ratio is taken within one run, call by
call in turn.

``layer`` replays one Transformer layer on this process alone, on CUDA where there is one: capture, copies,
replay with deterministic kernels, signatures and the exchange with itself, but nothing on a wire.
``training`` runs two Gloo ranks on the CPU with a model of 24 layers: whole checks, on real wires. ``fsdp2``
and ``tp`` do so with sharded parameters (two ranks) and with two replicas of two tensor-parallel ranks.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reporting import environment, heading, parser_of, publish
from torch import nn
from torch.nn import functional

from torchscout.attach import enable_resiliency
from torchscout.c3 import compare as c3
from torchscout.c3.channel import ProcessGroupChannel
from torchscout.config import Parallelism, ReplayConfig
from torchscout.mesh import Axis, PeerGroup
from torchscout.replay.recipe import Observation, finish_signatures
from torchscout.replay.recipes.layer import LayerRecipe
from torchscout.testing.local_ranks import preload, run_ranks

CUDA = torch.cuda.is_available()
VARIANTS = (0.1, 1.0, 10.0)
INTERVAL, LAYERS, ROUNDS = 20, 24, 9

Figures = dict[str, dict[str, Any]]


def main() -> None:
    arguments = parser_of(__doc__, PARTS).parse_args()
    report: dict[str, Any] = {
        **environment("torch", on_cuda=CUDA),
        "results": {name: PARTS[name]() for name in arguments.part or PARTS},
    }
    publish(report, table, arguments)


class Layer(nn.Module):
    """A Transformer layer as it is trained today: causal attention, an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return out


def layer_alone() -> Figures:
    """One realistic layer on the accelerator, a small one on a CPU."""
    device = torch.device("cuda" if CUDA else "cpu")
    width, heads, batch, length = (4096, 32, 2, 4096) if CUDA else (512, 8, 2, 256)
    dtype = torch.bfloat16 if CUDA else torch.float32
    torch.manual_seed(0)
    layer = Layer(width, heads).to(device, dtype)
    names = {parameter: name.replace(".", "/") for name, parameter in layer.named_parameters()}
    recipe = LayerRecipe("layer", {"layer": layer}, names, device)
    with tempfile.TemporaryDirectory() as folder, _alone(Path(folder)) as channel:
        figures = {}
        for variants in ((1.0,), VARIANTS):
            captured = _captured(layer, recipe, batch, length, width, device, dtype)

            def check(variants: tuple[float, ...] = variants, captured: Any = captured) -> None:
                _check(captured, variants, channel)

            def ideal(count: int = len(variants), captured: Any = captured) -> None:
                for _ in range(count):
                    _forward_and_backward(layer, captured)

            ours, theirs = _in_turn(check, ideal)
            figures[f"one layer, {len(variants)} variant(s)"] = {
                "check_ms": round(ours * 1e3, 2),
                "ideal_ms": round(theirs * 1e3, 2),
                "ratio": round(ours / theirs, 3),
                "goal": 1.25 if CUDA else None,
            }
            captured.release()
    return figures


def _captured(
    layer: Layer,
    recipe: LayerRecipe,
    batch: int,
    length: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """A replay that is ready to be observed."""
    replay = recipe.begin(0, is_source=True)
    x = torch.randn(batch, length, width, device=device, dtype=dtype, requires_grad=True)
    layer(x).backward(torch.randn_like(x))
    replay.prepare([json.loads(json.dumps(replay.describe()))], 0)
    replay.align(lambda _: None)
    return replay


def _check(replay: Any, variants: tuple[float, ...], channel: ProcessGroupChannel) -> None:
    evidence = {}
    for variant in variants:
        seen = Observation(variant)
        replay.observe(seen)
        finish_signatures([seen])
        evidence |= {f"{surface} {variant}": value for surface, value in seen.signatures.items()}
    c3.compare(channel, evidence)


def _forward_and_backward(layer: Layer, replay: Any) -> None:
    call = replay._call  # the same input and output gradient
    x = call.leaves[0].detach().requires_grad_()
    torch.autograd.grad(layer(x), [x, *layer.parameters()], call.gradients[0])


class _alone:  # noqa: N801  a context manager
    """A process group of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._store = dist.FileStore(str(folder / "store"), 1)

    def __enter__(self) -> ProcessGroupChannel:
        dist.init_process_group("gloo", rank=0, world_size=1, store=self._store)
        return ProcessGroupChannel(PeerGroup((0,), Axis.REPLICA), dist.group.WORLD)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def _in_turn(ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of both, called in turn; the first rounds warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 2):
        for work, into in zip((ours, theirs), times, strict=True):
            begin = _now()
            work()
            into.append(_now() - begin)
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.layers = nn.ModuleList(Layer(128, 4) for _ in range(LAYERS))
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def training(kind: str = "ddp") -> Figures:
    """Jobs without SCOUT, with nothing due, with a layer checked, with everything checked."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_train, 4 if kind == "tp" else 2, kind, Path(folder), timeout=900)
    step, bare, off, layer, every = (statistics.median(column) for column in zip(*found, strict=True))
    ideal = 1 / LAYERS
    return {
        "a step on which nothing is due": {
            "overhead": round((off - bare) / step, 4),
            "to": "a step without SCOUT",
        },
        "one layer checked": {
            "share_of_a_step": round((layer - bare) / step, 3),
            "ideal": round(ideal, 3),
            "ratio": round((layer - bare) / step / ideal, 2),
            "amortized": round((layer - bare) / step / INTERVAL, 5),
            "ideal_amortized": round(ideal / INTERVAL, 5),
        },
        "everything checked": {
            "share_of_a_step": round((every - bare) / step, 3),
            "amortized": round((every - bare) / step / INTERVAL, 5),
        },
    }


def _parallel(kind: str) -> tuple[nn.Module, Parallelism]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    if kind == "ddp":
        return DistributedDataParallel(net), Parallelism(replica=2)
    if kind == "fsdp2":
        for layer in [*net.layers, net]:
            fully_shard(layer)
        return net, Parallelism(shard=2)
    # Of a layer only the MLP is divided, and replicas see the same batch: gradients need no reduction.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, Parallelism(replica=2, tensor=2)


def _train(rank: int, kind: str, folder: Path) -> tuple[float, ...]:
    """Median seconds: of a step without SCOUT, and of the part of it where checks are, for each job."""
    torch.manual_seed(0)
    jobs = []
    configs = (None, _only("layer", 10**6), _only("layer", 1), ReplayConfig(interval=1))
    for place, config in enumerate(configs):
        model, parallelism = _parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if config is not None:
            enable_resiliency(
                model,
                optimizer,
                replay=config,
                observer=None,
                parallelism=parallelism,
                run_dir=folder / str(place),
            )
        jobs.append((model, optimizer))
    seed = 0 if kind == "tp" else rank
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(seed))
    steps: list[list[float]] = [[] for _ in jobs]
    updates: list[list[float]] = [[] for _ in jobs]
    for _ in range(3 * ROUNDS):
        for place, (model, optimizer) in enumerate(jobs):
            dist.barrier()
            begin = time.perf_counter()
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            middle = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            steps[place].append(end - begin)
            updates[place].append(end - middle)
    return statistics.median(steps[0][2:]), *(statistics.median(column[2:]) for column in updates)


def _only(recipe: str, interval: int) -> ReplayConfig:
    return ReplayConfig(recipes={recipe: interval})


def table(report: dict[str, Any]) -> str:
    lines = [heading(report)]
    for part, figures in report["results"].items():
        lines += ["", part]
        for name, row in figures.items():
            cells = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None)
            lines.append(f"  {name:32} {cells}")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], Figures]] = {
    "layer": layer_alone,
    "training": training,
    "fsdp2": functools.partial(training, "fsdp2"),
    "tp": functools.partial(training, "tp"),
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    preload("torch.nn.parallel", "torchscout.attach")
    main()
