"""Programs whose model is compiled in one of the usual ways, or runs as a CUDA graph.

What is compiled is counted, and the count is part of what training leaves behind: torchscout must not cause
any compilation. A first batch compiles the model before torchscout is attached, so that compiled code does
not hold the hooks by which faults come; they happen in replays only, which are eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.float8 import in_float8, scaling_of
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LENGTH, REPLICATED, next_token_loss, text
from torchscout.config import Parallelism

WARM = 2
"""Steps that are eager before a graph is captured."""


class Compilations:
    """A backend that counts how often it is used."""

    def __init__(self, device: str) -> None:
        self.count = 0
        self._backend = torch._dynamo.lookup_backend("aot_eager" if device == "cpu" else "inductor")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return self._backend(graph, inputs)


class Broken(GPT):
    """A model that cannot be compiled in one piece."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


class Buffered(GPT):
    """A model with a buffer, which DDP broadcasts in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shift.mul_(0.5)
        return super().forward(tokens) + self.shift


def inside_ddp(job: Job) -> None:
    _train(job, lambda backend: DistributedDataParallel(torch.compile(GPT(), backend=backend)))


def around_ddp(job: Job) -> None:
    _train(job, lambda backend: torch.compile(DistributedDataParallel(Buffered()), backend=backend))


def in_place(job: Job) -> None:
    def build(backend: Compilations) -> nn.Module:
        net = GPT()
        net.compile(backend=backend)
        return DistributedDataParallel(net)

    _train(job, build)


def forward_alone(job: Job) -> None:
    def build(backend: Compilations) -> nn.Module:
        net: Any = GPT()
        net.forward = torch.compile(net.forward, backend=backend)
        return DistributedDataParallel(net)

    _train(job, build)


def with_breaks(job: Job) -> None:
    _train(job, lambda backend: DistributedDataParallel(torch.compile(Broken(), backend=backend)))


def with_dynamic_shapes(job: Job) -> None:
    _train(
        job,
        lambda backend: DistributedDataParallel(torch.compile(GPT(), backend=backend, dynamic=True)),
        lengths=(LENGTH, LENGTH, 5, LENGTH, 11),
    )


def _train(job: Job, build: Callable[[Compilations], nn.Module], lengths: Sequence[int] = (LENGTH,)) -> None:
    torch._dynamo.reset()  # a job before this one may have used up the limit of compilations
    compilations = Compilations(job.device)
    model = build(compilations)

    def backward(step: int) -> None:
        length = lengths[step % len(lengths)]
        tokens, targets = text(step, job.rank)
        next_token_loss(model(tokens[:, :length]), targets[:, :length]).backward()

    for step in range(len(lengths)):
        backward(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer, also=lambda: [compilations.count])
    for step in job.steps():
        optimizer.zero_grad()
        backward(step)
        optimizer.step()


class Graphed(GPT):
    """A model whose parts are called in eager steps only.

    A graph that is replayed calls no module. On a CPU nothing does that, so there the model is called and its
    parts are not: what hooks on layers see is the same.
    """

    is_bypassed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self._call(self.tokens, tokens) + self._call(self.positions, places)
        for block in self.blocks:
            x = self._call(block, x)
        return self._call(self.head, self.norm(x))

    def _call(self, part: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return part.forward(given) if self.is_bypassed else part(given)


def cuda_graph(job: Job) -> None:
    """Forward and backward are a graph after some eager steps; gradients are averaged outside of it."""
    graphed(job, Graphed())


def cuda_graph_float8(job: Job) -> None:
    graphed(job, in_float8(Graphed()))


def graphed(job: Job, net: Graphed, *, warm: int = WARM, whole_step: bool = False) -> None:
    """``whole_step``: the update is part of the graph."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=job.device == "cuda")
    scaling = scaling_of(net)
    job.attach(
        net,
        optimizer,
        parallelism=Parallelism(replica=job.world),
        states={"scaling": scaling},
        also=lambda: [scaling.state_dict()],
    )
    passes = _Passes(job, net, optimizer.step if whole_step else None)
    for count, step in enumerate(job.steps()):
        for given, new in zip(passes.batch, text(step, job.rank), strict=True):
            given.copy_(new)
        optimizer.zero_grad(set_to_none=False)
        passes.run(is_eager=count < warm)
        if whole_step:
            continue
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world
        optimizer.step()


class _Passes:
    """The forward and backward passes of a step, on a batch that stays where it is.

    ``update`` is what comes after them in the graph.
    """

    def __init__(self, job: Job, net: Graphed, update: Callable[[], Any] | None) -> None:
        self.batch = [each.clone() for each in text(0, job.rank)]
        self._net, self._update, self._graph = net, update, None
        self._side = torch.cuda.Stream() if job.device == "cuda" else None

    def run(self, *, is_eager: bool) -> None:
        if self._side is None:
            self._net.is_bypassed = not is_eager
            self._both()
        elif is_eager:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._both()
            torch.cuda.current_stream().wait_stream(self._side)
        else:
            self._graph = self._graph or self._captured(self._side)
            self._graph.replay()

    def _captured(self, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            torch.cuda.current_blas_handle()  # it cannot be created during a capture
        # Only this thread captures, and NCCL's watchdog must be allowed to look at its events.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._both()
            if self._update is not None:
                self._update()
        return graph

    def _both(self) -> None:
        tokens, targets = self.batch
        next_token_loss(self._net(tokens), targets).backward()


# Training itself does not call the hook of a part that is compiled: all calls are replays.
WRONG = {
    "output": Wrong("blocks.1/output", 2, calls=None),
    "gradient": Wrong("blocks.1/grad_input", 2, calls=None),
    "embedding": Wrong("tokens/output", 1, calls=None),
    "head": Wrong("head/output", 1, calls=None),
}
GRAPHED = {
    "output": Wrong("blocks.1/output", 2, calls=None, step=6),
    "gradient": Wrong("blocks.1/grad_input", 2, calls=None, step=6),
    "weight": Wrong("blocks.0.up/weight", 1, calls=range(1), step=5),
}
_ON_CUDA = ("healthy", "slow_then_flipped", "wrong_number:output")

JOBS: dict[str, Entry] = {
    "compiled": Entry(
        inside_ddp,
        compared=REPLICATED,
        unchecked=(),
        wrong=WRONG,
        patience=3,
        in_ci=("healthy", "wrong_number:output"),
        on_cuda=_ON_CUDA,
    ),
    "compiled-around-ddp": Entry(
        around_ddp,
        compared=REPLICATED,
        unchecked=(),
        wrong={"output": WRONG["output"]},
        patience=3,
        on_cuda=("healthy",),
    ),
    "compiled-in-place": Entry(
        in_place, compared=REPLICATED, unchecked=(), wrong={"output": WRONG["output"]}, patience=3
    ),
    "compiled-forward": Entry(
        forward_alone, compared=REPLICATED, unchecked=(), wrong={"output": WRONG["output"]}, patience=3
    ),
    "compiled-with-breaks": Entry(
        with_breaks, compared=REPLICATED, unchecked=(), patience=3, on_cuda=("healthy",)
    ),
    "compiled-dynamic": Entry(
        with_dynamic_shapes, compared=REPLICATED, unchecked=(), patience=3, on_cuda=("healthy",)
    ),
    "cuda-graph": Entry(
        cuda_graph,
        compared=REPLICATED,
        unchecked=(),
        wrong=GRAPHED,
        in_ci=("wrong_number:output",),
        on_cuda=(*_ON_CUDA, "wrong_number:gradient", "wrong_number:weight", "late", "resumed"),
    ),
    "cuda-graph-float8": Entry(
        cuda_graph_float8,
        compared=REPLICATED,
        unchecked=(),
        wrong={"output": GRAPHED["output"]},
        on_cuda=(*_ON_CUDA, "late", "resumed"),
    ),
}
