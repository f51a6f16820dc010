"""Replays one module, forward and backward, on the source's input (paper, section 6.1.1, algorithm 2).

The embedding, the hidden layers and the output layer are replayed alike; they differ in what goes in. The
module is called as training calls it, with all hooks in place and its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torchscout.decision.record import Surface
from torchscout.decision.signature import PendingSignatures, digest
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.capture import broadcast as wire
from torchscout.replay.capture.context import (
    Determinism,
    autocast_as,
    buffers_of,
    deterministic,
    preserved,
    refusal,
    unmoved,
)
from torchscout.replay.capture.hooks import WRITES, CallCapture
from torchscout.replay.capture.invocation import Invocation, RowResize, is_floating
from torchscout.replay.capture.saved_calls import recalled
from torchscout.replay.compiled import CompiledCode, EagerCall, eagerly, is_compiled
from torchscout.replay.guard import UnannouncedError, announced
from torchscout.replay.recipe import ABSENT, Comparison, Given, Mode, Observation
from torchscout.replay.sharded_parameters import (
    NOBODY,
    Elsewhere,
    ParameterGatherers,
    Reduction,
    awaken,
    gathered,
    gathered_again,
)
from torchscout.replay.timing import timed
from torchscout.utils._torch import tree_leaves

__all__ = ["LayerRecipe", "LayerReplay"]

_TIE = "replicas hold different shards, which the census of all state compares"
"""As many ranks gather one set of parameters as another: those of one replica, from its own shards."""


class LayerRecipe:
    """Modules of one role, one of which is replayed at a time."""

    varies = True
    is_gathered = True
    is_dynamic = False
    is_swept = True
    is_required = True

    def __init__(
        self,
        kind: str,
        modules: Mapping[str, nn.Module],
        surfaces: Mapping[torch.Tensor, Surface],
        device: torch.device,
        gatherers: Callable[[nn.Module], ParameterGatherers] = lambda _: NOBODY,
        role: LayerKind = LayerKind.DENSE,
        compiled: CompiledCode | None = None,
    ) -> None:
        self.kind, self.role = kind, role
        self.targets = self._names = tuple(modules)
        self._modules, self._surfaces, self._device = tuple(modules.values()), surfaces, device
        self._keepers, self._compiled = gatherers, compiled
        if compiled is not None:
            compiled.expect(self._modules)
        self._determinism = [Determinism() for _ in self._modules]
        """What was learned of each module, for all later checks."""
        self.is_owned: Callable[[Surface], bool] = lambda _: False
        """Whether peers hold different ones of a parameter by design: then they compute different things."""
        self._refused: dict[nn.Module, str] = {}
        """Modules that issue collectives of their own, with the reason why they are not replayed."""

    def refuse(self, reason: str) -> None:
        """Replay none of these modules."""
        self._refused |= dict.fromkeys(self._modules, reason)

    def keep(self, names: Sequence[str]) -> None:
        """Replay these modules only, in this order."""
        places = [self._names.index(name) for name in names]
        self.targets = self._names = tuple(names)
        self._modules = tuple(self._modules[place] for place in places)
        self._determinism = [self._determinism[place] for place in places]

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> LayerReplay:
        return self._replay(target, is_source)

    def again(self, target: int, given: Given) -> LayerReplay:
        return self._replay(target, given.is_source, self._recalled(target, given))

    def _recalled(self, place: int, given: Given) -> Invocation:
        module = self._modules[place]
        if given.call is None:
            raise ReplayError("no call of it was kept")
        awaken(self._keepers(module))
        return recalled(given.call, module, self._device, given.tensors)

    def _replay(self, place: int, is_source: bool, call: Invocation | EagerCall | None = None) -> LayerReplay:
        module, name = self._modules[place], self._names[place]
        trained = {path: each for path, each in module.named_parameters() if each.requires_grad}
        if not all(each in self._surfaces for each in trained.values()):
            raise ReplayError("it has a parameter that was not there when replay was attached")
        surfaces = (self._surfaces.get(each, "") for each in module.parameters())
        if owned := [surface for surface in surfaces if self.is_owned(surface)]:
            raise ReplayError(f"peers hold different ones of {owned[0]} by design")
        named = {f"{self._surfaces[each]}.grad": path for path, each in trained.items()}
        gatherers = self._keepers(module)
        # Where parameters are gathered, an eager pass over a whole model would communicate.
        compiled = None if gatherers.modules else self._compiled
        is_eager = compiled is not None and compiled.has_inside(module)
        if compiled is not None and is_eager and call is None:
            call = compiled.call_of(module, is_source=is_source)
        replay = LayerReplay(
            name,
            module,
            named,
            self._device,
            is_source=is_source,
            gatherers=gatherers,
            kind=self.kind,
            call=call,
        )
        replay.determinism, replay.refused = self._determinism[place], self._refused
        replay.is_eager = is_eager
        return replay


class LayerReplay:
    """One module at the end of one step."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        gradients: Mapping[Surface, str],
        device: torch.device,
        *,
        is_source: bool,
        gatherers: ParameterGatherers = NOBODY,
        kind: str = "layer",
        call: Invocation | EagerCall | None = None,
    ) -> None:
        """``call`` is what to replay, where it is not training's next one."""
        self._name, self._module, self._device, self._is_source = name, module, device, is_source
        self._parameters = gradients
        """Those whose gradients are compared: their paths in the module, by surface."""
        self._keepers = gatherers
        self._compares_shards = bool(gatherers.modules) and gatherers.copies
        """Whether this rank's shards are compared before what is gathered from them."""
        self._shards: PendingSignatures | None = None
        self._reduction: Reduction | None = None
        self._work = f"time/{'module' if kind == 'layer' else kind}"
        self._communication = "time/" if kind == "layer" else f"time/{kind}_"
        self._refusal = gatherers.obstacle or refusal(module)
        self.rerouting: RowResize | None = None
        """With which numbers of rows it is replayed, if not as it was called."""
        self.determinism = Determinism()
        """Which of its passes can run under strict deterministic algorithms."""
        self.refused: dict[nn.Module, str] = {}
        """Filled in where a replay was refused for good; the recipe's."""
        self.is_eager = False
        """Whether to run it eagerly though training compiles it: see ``compiled``."""
        self._own = call if isinstance(call, Invocation) else None
        """This rank's call; until it is over, None."""
        self._capture: CallCapture | EagerCall | None = call if isinstance(call, EagerCall) else None
        if call is None and not self._refusal:
            self._capture = CallCapture(module, device, keep=is_source, expected=gatherers.expected)
        self._call: Invocation | None = None
        """The source's call: room for it first, its values once aligned."""
        self._buffers: dict[str, torch.Tensor] = {}
        """The source's."""

    def describe(self) -> dict[str, Any]:
        if refused := self._refusal or self.refused.get(self._module):
            raise ReplayError(refused)
        if self._capture is not None:
            self._own = self._capture.invocation().densified()
        assert self._own is not None, "captured, or given"
        if self.rerouting is not None and self._is_source:
            self.rerouting.require(self._own)
        buffers = {name: wire.described(each) for name, each in self._buffers_before().items()}
        return {**self._own.describe(), "buffers": buffers, "parameters": list(self._parameters)}

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        assert self._own is not None, "described first"
        own, told = self._buffers_before(), descriptions[source]
        if list(told["buffers"]) != list(own):
            raise ReplayError(f"its buffers are {list(own)} here and {list(told['buffers'])} on the source")
        if other := sorted(self._parameters.keys() ^ set(told["parameters"])):
            raise ReplayError(f"gradient names differ from the source: {other}")
        if self._compares_shards:
            self._shards = PendingSignatures(self._module.parameters())
        if self._keepers.route is not None and self._parameters:
            self._reduction = Reduction(self._keepers.route, self._weights())
        if self._is_source:
            self._call = self._own
            self._buffers = {name: wire.captured(each) for name, each in own.items()}
        else:
            self._call = self._own.like(told, self._device)
            self._buffers = {
                name: wire.room_for(each, self._device, wire.DTensorLayout.of(own[name]))
                for name, each in told["buffers"].items()
            }

    def align(self, broadcast: wire.Broadcast) -> None:
        wire.receive(self._aligned(), broadcast)

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        # Compiled code is the module's own; otherwise layers of one shape run the same kernels.
        assert self._call is not None, "prepared first"
        first = next((leaf.shape for leaf in self._call.leaves if isinstance(leaf, torch.Tensor)), ())
        return self._name if self._runs_compiled else "", tuple(first)

    def comparisons(self) -> list[Comparison]:
        assert self._call is not None, "prepared first"
        given, weights = f"{self._name}/input", f"{self._name}/parameters"
        nothing = "no gradient reached it"
        if not (self._call.gradients or self._call.replaced):
            nothing = "no gradient reached the output of the module"
        shards = [f"{self._name}/shards"] if self._compares_shards else []
        tie = _TIE if self._keepers.is_mixed else None
        gradients, output = [*self._inputs(), *self._parameters], f"{self._name}/output"
        premises = (given, weights, output) if self._call.replaced else (given, weights)
        return [
            Comparison(given, Mode.INPUT),
            *(Comparison(each, Mode.STATE) for each in shards),
            Comparison(weights, Mode.STATE, tuple(shards), absent="it has no parameters", tie=tie),
            Comparison(output, Mode.FORWARD, (given, weights), absent="it returns no tensor"),
            *(Comparison(each, Mode.BACKWARD, premises, absent=nothing) for each in gradients),
            *self._reductions(tuple(gradients)),
        ]

    def observe(self, variant: float, seen: Observation) -> None:
        # Training's own collectives do not depend on whether a pass succeeds: every rank must come to them.
        gathering = timed(self._device, seen, work=None, communication=self._communication + "{}")
        with self._reduced(seen), gathered(self._keepers, gathering), ExitStack() as around:
            with gathered_again(self._keepers):
                self._route()
                around.enter_context(self._as_in_training())
                elsewhere = around.enter_context(self._keepers.around())
                with self._kernels(Mode.FORWARD, seen):
                    inputs, outputs = self._forward(variant, seen)
            with self._kernels(Mode.BACKWARD, seen):
                self._backward(inputs, outputs, seen, elsewhere)
            self._mark(seen)

    def _route(self) -> None:
        """Once values are there: what is wanted is made of them, the same on all peers."""
        if self.rerouting is not None and self._call is not None:
            self._call, self.rerouting = self.rerouting.applied(self._call), None

    def _forward(
        self, variant: float, seen: Observation
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Fill in what the pass starts from and what it gives; return its inputs and outputs."""
        assert self._call is not None, "prepared first"
        inputs, weights = _inputs(self._call, variant), list(self._module.parameters())
        versions = [each._version for each in weights]
        seen.sign_as_one(f"{self._name}/input", [*inputs.values(), *self._aligned(besides=inputs)])
        if (shards := self._shards) is not None:
            surface = f"{self._name}/shards"
            seen.when_signed(shards, lambda found: seen.signatures.update({surface: digest(found)}))
        _sign(seen, f"{self._name}/parameters", weights)
        self._call.randomness.apply(self._device)
        # Copies: a module may write into its arguments, and autograd forbids that to a leaf.
        args, kwargs = self._call.arguments({place: each.clone() for place, each in inputs.items()})
        with autocast_as(self._call.autocast), self._timed(seen, ""), announced(self._keepers.together):
            outputs = _tensors(self._module(*args, **kwargs))
        if versions != [each._version for each in weights]:
            raise ReplayError(WRITES)
        _sign(seen, f"{self._name}/output", outputs)
        return list(inputs.values()), outputs

    def invocation(self) -> Invocation | None:
        return self._own if self._is_source else None

    def release(self) -> None:
        if self._capture is not None:
            self._capture.disarm()
        self._own = self._call = self._reduction = None
        self._buffers = {}

    def _aligned(self, *, besides: Mapping[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """All that came from the source; ``besides`` the inputs, where those are given scaled."""
        assert self._call is not None, "prepared first"
        tensors = self._call.tensors()
        return [*tensors[len(besides or ()) :], *self._buffers.values()]

    def _buffers_before(self) -> dict[str, torch.Tensor]:
        """This rank's, as its own call found them."""
        assert self._own is not None, "captured first"
        return {name: self._own.buffers.get(name, each) for name, each in buffers_of(self._module).items()}

    def _inputs(self) -> list[Surface]:
        """All input gradients together, if there are any: indices have none."""
        assert self._call is not None, "prepared first"
        return [f"{self._name}/grad_input"] if any(self._call.requires_grad) else []

    @contextmanager
    def _kernels(self, passed: str, seen: Observation) -> Iterator[None]:
        """Around one pass: deterministic kernels, as far as there are any; compiled code has its own."""
        mode = deterministic(strict=passed not in self.determinism.relaxed)
        try:
            with nullcontext() if self._runs_compiled else mode:
                yield
        except UnannouncedError as error:
            self.refused[self._module] = str(error)
            raise
        except RuntimeError as error:
            if self.determinism.learn(passed, error):
                seen.refused.append(str(error))
            raise

    def _mark(self, seen: Observation) -> None:
        """What the passes that lack a deterministic operator have computed."""
        behind = [*self._inputs(), *self._parameters]
        computed = {Mode.BACKWARD: behind, Mode.FORWARD: [f"{self._name}/output", *behind]}
        for passed, reason in self.determinism.lacking.items():
            found = (each for each in computed[passed] if seen.signatures.get(each) != ABSENT)
            seen.unrepeatable.update(dict.fromkeys(found, reason))

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        assert self._call is not None, "prepared first"
        untouched = preserved(self._module, self._buffers, self._call.randomness.seed)
        attention, mode = self._call.attention.again(), eagerly() if self.is_eager else nullcontext()
        with mode, unmoved(self._device), untouched, attention, torch.enable_grad():
            yield

    @property
    def _runs_compiled(self) -> bool:
        return not self.is_eager and is_compiled(self._module)

    def _timed(self, seen: Observation, suffix: str) -> AbstractContextManager[None]:
        communication = f"{self._communication}{{}}{suffix}@"
        return timed(self._device, seen, work=self._work + suffix, communication=communication)

    def _weights(self) -> list[torch.Tensor]:
        """Those whose gradients are compared: shards, or what was gathered from them."""
        weights = dict(self._module.named_parameters())
        return [weights[path] for path in self._parameters.values()]

    def _reductions(self, gradients: tuple[Surface, ...]) -> list[Comparison]:
        """What becomes of the gradients, where they agree: all ranks of a replica go into the result."""
        if self._reduction is None or not (self._reduction.has_copies and self._compares_shards):
            return []
        scattered = f"{self._name}/grad_scattered"
        return [
            Comparison(scattered, Mode.BACKWARD, gradients),
            Comparison(f"{self._name}/grad_reduced", Mode.BACKWARD, (scattered,)),
        ]

    @contextmanager
    def _reduced(self, seen: Observation) -> Iterator[None]:
        """After this block, whatever became of it, gradients are reduced as after a backward pass."""
        try:
            yield
        finally:
            if self._reduction is not None:
                with (
                    timed(self._device, seen, work=None, communication=self._communication + "{}"),
                    announced(),
                ):
                    found = self._reduction.run()
                surfaces = [each.surface for each in self._reductions(())]
                for surface, pending in zip(surfaces, found, strict=False):
                    seen.when_signed(pending, _single(seen, surface))

    def _backward(
        self,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        seen: Observation,
        elsewhere: Elsewhere | None,
    ) -> None:
        assert self._call is not None, "prepared first"
        inputs = [x for x in given if x.requires_grad]
        wanted = [*inputs, *self._weights()]
        pairs = [(outputs[place], each) for place, each in self._call.gradients.items()]
        pairs += [(outputs[place], outputs[place].detach()) for place in self._call.replaced]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            roots, arriving = zip(*pairs, strict=True)
            without = dict.fromkeys(self._call.autocast)  # as backward usually runs
            with autocast_as(without), self._timed(seen, "_backward"), announced(self._keepers.together):
                gradients = torch.autograd.grad(roots, wanted, arriving, allow_unused=True)
        if elsewhere is not None:
            got = zip(wanted, gradients, strict=True)
            gradients = [each if (kept := elsewhere(of)) is None else kept for of, each in got]
        if self._reduction is not None:
            self._reduction.take(gradients[len(inputs) :])
        of_inputs = [each for each in gradients[: len(inputs)] if each is not None]
        for surface in self._inputs():
            _sign(seen, surface, of_inputs)
        of_weights = dict(zip(self._parameters, gradients[len(inputs) :], strict=True))
        seen.signatures.update({surface: ABSENT for surface, each in of_weights.items() if each is None})
        seen.sign({surface: _strided(each) for surface, each in of_weights.items() if each is not None})


def _single(seen: Observation, surface: Surface) -> Callable[[list[int]], None]:
    return lambda found: seen.signatures.update({surface: found[0]})


def _sign(seen: Observation, surface: Surface, tensors: Sequence[torch.Tensor]) -> None:
    """All of them as one, or that there are none."""
    if tensors:
        seen.sign_as_one(surface, tensors)
    else:
        seen.signatures[surface] = ABSENT


def _inputs(call: Invocation, variant: float) -> dict[int, torch.Tensor]:
    """The call's tensors by place, ready to be differentiated; floating ones scaled."""
    inputs = {}
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            scaled = leaf * variant if variant != 1 and is_floating(leaf) else leaf.detach()
            inputs[place] = scaled.requires_grad_(call.requires_grad[place])
    return inputs


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse gradient has no bytes of its own; as a dense one it has."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
