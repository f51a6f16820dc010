"""Replays one module, forward and backward, on the source's input (paper, section 6.1.1, algorithm 2).

Used for the embedding, the hidden layers and the output layer. The module is called as training calls it,
with all hooks in place and its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchscout.c3.signature import PendingSignatures
from torchscout.decision.types import Surface
from torchscout.errors import ReplayError, describe_error
from torchscout.mesh import LayerKind
from torchscout.replay.capture import broadcast as wire
from torchscout.replay.capture import context
from torchscout.replay.capture.first_calls import FirstCall
from torchscout.replay.capture.hooks import WRITES, CallCapture
from torchscout.replay.capture.invocation import Invocation, RowResize, is_floating, tensors_in
from torchscout.replay.capture.saved_calls import restored
from torchscout.replay.compiled import CompiledCode, EagerCall, FormCall, eagerly, is_compiled
from torchscout.replay.guard import UnannouncedError, announced
from torchscout.replay.recipe import ABSENT, Comparison, Mode, Observation, Recipe, Replay, SavedInput
from torchscout.replay.sharded_parameters import (
    GradientLookup,
    ParameterGatherers,
    Reduction,
    gathered,
    gathered_again,
    initialize,
)
from torchscout.replay.timing import timed

__all__ = ["LayerRecipe", "LayerReplay"]

_TIE = "replicas hold different shards, which the comparison of all state covers"
"""Ranks of one replica gather from its own shards, so that equally many may gather one version as another."""


@dataclass(slots=True)
class _Layer:
    """One module, and what checks have learned about it."""

    name: str
    module: nn.Module
    determinism: context.Determinism = field(default_factory=context.Determinism)
    """Which of its passes can run under strict deterministic algorithms."""
    refusal: str | None = None
    """Why it is never replayed, such as collectives that it issues itself."""


class LayerRecipe(Recipe):
    """Modules of one kind, replayed one at a time."""

    varies = True
    is_gathered = True
    is_swept = True

    def __init__(
        self,
        kind: str,
        modules: Mapping[str, nn.Module],
        surfaces: Mapping[torch.Tensor, Surface],
        device: torch.device,
        gatherers: Callable[[nn.Module], ParameterGatherers] = lambda _: ParameterGatherers(),
        role: LayerKind = LayerKind.DENSE,
        compiled: CompiledCode | None = None,
    ) -> None:
        self.kind, self.role, self.targets = kind, role, tuple(modules)
        self._layers = [_Layer(name, module) for name, module in modules.items()]
        self._surfaces, self._device = surfaces, device
        self._gatherers, self._compiled = gatherers, compiled
        self._first: dict[str, FirstCall] = {}
        """The first call of each module, from the start of training on."""
        if compiled is not None:
            compiled.expect(modules.values())
        self.is_owned: Callable[[Surface], bool] = lambda _: False
        """Whether a parameter differs among peers by design: the layer's results then differ, too."""

    @property
    def modules(self) -> int:
        """How many modules are replayed."""
        return len(self._layers) - len(self.refused())

    def refused(self) -> dict[str, str]:
        """Return why modules are never replayed, by name."""
        return {each.name: each.refusal for each in self._layers if each.refusal is not None}

    def start(self) -> None:
        for each in self._layers:
            compiled = self._compiled
            if each.refusal is None and compiled is not None and compiled.is_inside(each.module):
                compiled.start(each.module)
            elif each.refusal is None:
                expected = self._gatherers(each.module).expected
                self._first[each.name] = FirstCall(each.module, self._device, expected)

    def close(self) -> None:
        for each in self._first.values():
            each.disarm()
        if self._compiled is not None:
            self._compiled.close()

    def refuse(self, reason: str) -> None:
        """Replay none of these modules."""
        for each in self._layers:
            each.refusal = reason

    def keep(self, names: Sequence[str]) -> None:
        """Replay only these modules, in this order."""
        by_name = {each.name: each for each in self._layers}
        self._layers, self.targets = [by_name[name] for name in names], tuple(names)

    def swept_bytes(self, target: int) -> int:
        # A ``Reduction`` has room for the gradients of all its parameters.
        return sum(each.nbytes for each in self._layers[target].module.parameters())

    def new_replay(self, target: int, is_source: bool, saved: SavedInput | None, /) -> LayerReplay:
        layer, module = self._layers[target], self._layers[target].module
        if layer.refusal is not None:  # such as CUDA graphs, whose memory a hook must not touch
            raise ReplayError(layer.refusal)
        gatherers = self._gatherers(module)
        call: Invocation | CallCapture | EagerCall | FormCall | None = None
        if saved is not None:
            if saved.call is None:
                raise ReplayError("no call of it was saved")
            initialize(gatherers)
            call = restored(saved.call, module, self._device, saved.tensors)
        gradients = self._gradients(module)
        compiled = self._compiled
        is_eager = compiled is not None and compiled.has_inside(module)
        if compiled is not None and is_eager and call is None:
            call = compiled.call_of(module, is_source=is_source)
        if call is None:
            call = self.capture_in_use(target)
        first = self._first.get(layer.name)
        replay = LayerReplay(
            layer, gradients, self._device, gatherers, is_source=is_source, call=call, first=first
        )
        replay.is_eager = is_eager
        if self.kind != "layer":
            replay.work_surface, replay.communication = f"time/{self.kind}", f"time/{self.kind}_"
        return replay

    def capture_in_use(self, place: int) -> CallCapture | None:  # noqa: ARG002  for subclasses
        """Return the capture of another replay of this module in the same check, if there is one."""
        return None

    def _gradients(self, module: nn.Module) -> dict[Surface, str]:
        """Return the surfaces of the gradients to compare, with the parameters' paths in the module."""
        trained = {path: each for path, each in module.named_parameters() if each.requires_grad}
        if not all(each in self._surfaces for each in trained.values()):
            raise ReplayError("it has a parameter that was not there when replay was attached")
        surfaces = (self._surfaces.get(each, "") for each in module.parameters())
        if owned := [surface for surface in surfaces if self.is_owned(surface)]:
            raise ReplayError(f"{owned[0]} differs among peers by design")
        return {f"{self._surfaces[each]}.grad": path for path, each in trained.items()}


class LayerReplay(Replay):
    """One module at the end of one step."""

    def __init__(
        self,
        layer: _Layer,
        gradients: Mapping[Surface, str],
        device: torch.device,
        gatherers: ParameterGatherers,
        *,
        is_source: bool,
        call: Invocation | CallCapture | EagerCall | FormCall | None = None,
        first: FirstCall | None = None,
    ) -> None:
        """``gradients`` are those to compare: paths of parameters in the module, by surface.

        ``call`` is what to replay, if not training's next call of the module, or one like its ``first``.
        """
        module = layer.module
        self._layer, self._name, self._module, self.determinism = layer, layer.name, module, layer.determinism
        self._parameters, self._gatherers = gradients, gatherers
        self._device, self._is_source = device, is_source
        self._compares_shards = bool(gatherers.modules) and gatherers.copies
        """Whether peers compare their shards before the parameters gathered from them."""
        self._shards: PendingSignatures | None = None
        self._reduction: Reduction | None = None
        self.work_surface, self.communication = "time/module", "time/"
        self._refusal = gatherers.obstacle or context.refusal(module)
        self.resize: RowResize | None = None
        """Numbers of rows to replay with, if not those of the call."""
        self.is_eager = False
        """Whether to run it eagerly although training compiles it: see ``compiled``."""
        self._own = call if isinstance(call, Invocation) else None
        """This rank's call; None until it has been captured."""
        self.capture = call if isinstance(call, CallCapture | EagerCall | FormCall) else None
        if call is None and not self._refusal:
            expected = gatherers.expected
            self.capture = CallCapture(module, device, keep=is_source, expected=expected, first=first)
        self._call: Invocation | None = None
        """The source's call: allocated in ``prepare``, filled by ``align``."""
        self._buffers: dict[str, torch.Tensor] = {}
        """The source's."""

    def describe(self) -> dict[str, Any]:
        if refusal := self._refusal or self._layer.refusal:
            raise ReplayError(refusal)
        if self.capture is not None:
            self._own = self.capture.invocation().densified()
        assert self._own is not None, "captured, or given"
        if self.resize is not None and self._is_source:
            self.resize.require(self._own)
        buffers = {name: wire.described(each) for name, each in self._buffers_before(self._own).items()}
        return {**self._own.describe(), "buffers": buffers, "parameters": list(self._parameters)}

    def prepare(self, descriptions: Sequence[Any], source: int, /) -> None:
        assert self._own is not None, "describe comes first"
        own, given = self._buffers_before(self._own), descriptions[source]
        if list(given["buffers"]) != list(own):
            raise ReplayError(f"its buffers are {list(own)} here and {list(given['buffers'])} on the source")
        if other := sorted(self._parameters.keys() ^ set(given["parameters"])):
            raise ReplayError(f"gradient names differ from the source: {other}")
        if self._compares_shards:
            self._shards = PendingSignatures(self._module.parameters())
        if self._gatherers.route is not None and self._parameters:
            self._reduction = Reduction(self._gatherers.route, self._weights())
        if self._is_source:
            self._call = self._own
            self._buffers = {name: wire.captured(each) for name, each in own.items()}
        else:
            self._call = self._own.like(given, self._device)
            self._buffers = {
                name: wire.room_for(each, self._device, wire.DTensorLayout.of(own[name]))
                for name, each in given["buffers"].items()
            }

    def align(self, broadcast: wire.Broadcast, /) -> None:
        wire.receive([*self._input.tensors(), *self._buffers.values()], broadcast)

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        # Compiled code belongs to one module; otherwise layers of one shape run the same kernels.
        first = next((leaf.shape for leaf in self._input.leaves if isinstance(leaf, torch.Tensor)), ())
        return self._name if self._runs_compiled else "", tuple(first)

    def comparisons(self) -> list[Comparison]:
        call, given, weights = self._input, f"{self._name}/input", f"{self._name}/parameters"
        no_gradient = "no gradient reached it"
        if not (call.gradients or call.replaced):
            no_gradient = "no gradient reached the output of the module"
        shards = [f"{self._name}/shards"] if self._compares_shards else []
        tie = _TIE if self._gatherers.is_mixed else None
        gradients, output = self._computed_backward(), f"{self._name}/output"
        premises = (given, weights, output) if call.replaced else (given, weights)
        found = [
            Comparison(given, Mode.INPUT),
            *(Comparison(each, Mode.STATE) for each in shards),
            Comparison(weights, Mode.STATE, tuple(shards), absent="it has no parameters", tie=tie),
            Comparison(output, Mode.FORWARD, (given, weights), absent="it returns no tensor"),
            *(Comparison(each, Mode.BACKWARD, premises, absent=no_gradient) for each in gradients),
        ]
        # Of gradients of all ranks of a replica, so these must agree first.
        for surface in self._reduced_surfaces():
            found.append(Comparison(surface, Mode.BACKWARD, tuple(gradients)))
            gradients = [surface]
        return found

    def observe(self, seen: Observation) -> None:
        # Training's own collectives do not depend on whether a pass succeeds: every rank must issue them.
        gathering = timed(self._device, seen, work=None, communication=self.communication + "{}")
        with self._reduced(seen), gathered(self._gatherers, gathering), ExitStack() as around:
            around.push(lambda _, error, __: self._failed(error, seen))
            with gathered_again(self._gatherers):
                if self.resize is not None:  # on the source's values, so that all peers make the same of them
                    self._call, self.resize = self.resize.applied(self._input), None
                around.enter_context(self._as_in_training())
                elsewhere = around.enter_context(self._gatherers.around())
                with self._kernels(Mode.FORWARD, seen):
                    inputs, outputs = self._forward(seen)
            with self._kernels(Mode.BACKWARD, seen):
                self._backward(inputs, outputs, seen, elsewhere)
            self._mark_unrepeatable(seen)

    def invocation(self) -> Invocation | None:
        return self._own if self._is_source else None

    def release(self) -> None:
        if self.capture is not None:
            self.capture.disarm()
        self._own = self._call = self._reduction = None
        self._buffers = {}

    def _forward(self, seen: Observation) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Sign what the pass starts from and what it computes; return its inputs and outputs."""
        call, weights = self._input, list(self._module.parameters())
        inputs = _inputs(call, seen.variant)
        versions = [each._version for each in weights]
        besides = [*call.tensors()[len(inputs) :], *self._buffers.values()]
        seen.sign_as_one(f"{self._name}/input", [*inputs.values(), *besides])
        if self._shards is not None:
            seen.sign_as_one(f"{self._name}/shards", self._shards)
        seen.sign_as_one(f"{self._name}/parameters", weights)
        call.randomness.apply(self._device)
        # Copies: a module may write to its arguments, which autograd forbids for leaves.
        args, kwargs = call.arguments({place: each.clone() for place, each in inputs.items()})
        with context.autocast_as(call.autocast), self._timed(seen), announced(self._gatherers.together):
            outputs = tensors_in(self._module(*args, **kwargs))
        if versions != [each._version for each in weights]:
            raise ReplayError(WRITES)
        seen.sign_as_one(f"{self._name}/output", outputs)
        return list(inputs.values()), outputs

    def _backward(
        self,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        seen: Observation,
        elsewhere: GradientLookup | None,
    ) -> None:
        call, inputs = self._input, [x for x in given if x.requires_grad]
        wanted = [*inputs, *self._weights()]
        pairs = [(outputs[place], each) for place, each in call.gradients.items()]
        pairs += [(outputs[place], outputs[place].detach()) for place in call.replaced]
        gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            roots, arriving = zip(*pairs, strict=True)
            off = context.autocast_as(dict.fromkeys(call.autocast))  # as backward usually runs
            with off, self._timed(seen, "_backward"), announced(self._gatherers.together):
                gradients = torch.autograd.grad(roots, wanted, arriving, allow_unused=True)
        if elsewhere is not None:
            returned = zip(wanted, gradients, strict=True)
            gradients = [each if (kept := elsewhere(of)) is None else kept for of, each in returned]
        of_inputs, of_weights = gradients[: len(inputs)], gradients[len(inputs) :]
        if self._reduction is not None:
            self._reduction.take(of_weights)
        for surface in self._input_gradient():
            seen.sign_as_one(surface, [each for each in of_inputs if each is not None])
        named = dict(zip(self._parameters, of_weights, strict=True))
        seen.signatures.update({surface: ABSENT for surface, each in named.items() if each is None})
        seen.sign({surface: _strided(each) for surface, each in named.items() if each is not None})

    @property
    def _input(self) -> Invocation:
        assert self._call is not None, "prepare comes first"
        return self._call

    def _buffers_before(self, own: Invocation) -> dict[str, torch.Tensor]:
        """Return this rank's buffers as they were before its own call."""
        return {name: own.buffers.get(name, each) for name, each in context.state_of(self._module).items()}

    def _input_gradient(self) -> list[Surface]:
        """Return the surface of all input gradients together; none if no input has one, as indices."""
        return [f"{self._name}/grad_input"] if any(self._input.requires_grad) else []

    def _computed_backward(self) -> list[Surface]:
        return [*self._input_gradient(), *self._parameters]

    @contextmanager
    def _kernels(self, mode: str, seen: Observation) -> Iterator[None]:
        """Use deterministic kernels, where they exist, in one pass; compiled code keeps its own."""
        kernels = context.deterministic(strict=mode not in self.determinism.relaxed)
        try:
            with nullcontext() if self._runs_compiled else kernels:
                yield
        except UnannouncedError as error:
            self._layer.refusal = str(error)
            raise
        except RuntimeError as error:
            if self.determinism.learn(mode, error):
                seen.refused.append(str(error))
            raise

    def _failed(self, error: BaseException | None, seen: Observation) -> None:
        """Leave the module out of later checks if it fails on input that training never gave it."""
        is_new = not seen.refused and self._layer.refusal is None
        if self._input.is_made_up and isinstance(error, Exception) and is_new:
            self._layer.refusal = f"it fails on random numbers of its input's form: {describe_error(error)}"

    def _mark_unrepeatable(self, seen: Observation) -> None:
        """Mark the results of passes that lack a deterministic operator."""
        backward = self._computed_backward()
        computed = {Mode.BACKWARD: backward, Mode.FORWARD: [f"{self._name}/output", *backward]}
        for mode, reason in self.determinism.lacking.items():
            found = (each for each in computed[mode] if seen.signatures.get(each) != ABSENT)
            seen.unrepeatable.update(dict.fromkeys(found, reason))

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        call = self._input
        untouched = context.preserved(self._module, self._buffers, call.randomness.seed)
        stance = eagerly() if self.is_eager else nullcontext()
        with (
            stance,
            context.preserved_rng(self._device),
            untouched,
            call.attention.applied(),
            torch.enable_grad(),
        ):
            yield

    @property
    def _runs_compiled(self) -> bool:
        return not self.is_eager and is_compiled(self._module)

    def _timed(self, seen: Observation, suffix: str = "") -> AbstractContextManager[None]:
        communication = f"{self.communication}{{}}{suffix}@"
        return timed(self._device, seen, work=self.work_surface + suffix, communication=communication)

    def _weights(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are compared: shards, or gathered from them."""
        weights = dict(self._module.named_parameters())
        return [weights[path] for path in self._parameters.values()]

    def _reduced_surfaces(self) -> list[Surface]:
        """Return the surfaces of the reduced gradients, where peers hold copies of them."""
        if self._reduction is None or not (self._reduction.has_copies and self._compares_shards):
            return []
        return [f"{self._name}/grad_scattered", f"{self._name}/grad_reduced"]

    @contextmanager
    def _reduced(self, seen: Observation) -> Iterator[None]:
        """Reduce gradients after this block, as after a backward pass, even if the block fails."""
        try:
            yield
        finally:
            if self._reduction is not None:
                gathering = timed(self._device, seen, work=None, communication=self.communication + "{}")
                with gathering, announced():
                    found = self._reduction.run()
                for surface, pending in zip(self._reduced_surfaces(), found, strict=False):
                    seen.sign_as_one(surface, pending)


def _inputs(call: Invocation, variant: float) -> dict[int, torch.Tensor]:
    """Return the call's tensors by place, ready to be differentiated; floating-point ones scaled."""
    inputs = {}
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            scaled = leaf * variant if variant != 1 and is_floating(leaf) else leaf.detach()
            inputs[place] = scaled.requires_grad_(call.requires_grad[place])
    return inputs


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a dense one, which can be signed."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
