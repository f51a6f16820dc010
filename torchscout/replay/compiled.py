"""Captures the inputs of modules inside compiled code (paper, section 6.1).

``torch.compile(model)`` compiles a whole model, and hooks on the modules inside do not run, so the calls of
its layers cannot be captured. Such a layer is replayed eagerly, with its current weights, on an input saved
once:

1. In a step at whose end a layer is due, the call of the compiled module around it is captured.
2. After that step the same call is repeated eagerly. Hooks save the input of every module that is replayed;
   modules of one kind share one saved input.
3. Later checks use the saved inputs. Gradients of outputs are random numbers.

Peers receive the source's values, so these need not be training's own. Compiled code is neither called nor
compiled again: see ``eagerly``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchscout.errors import ReplayError, describe_error
from torchscout.replay.capture.broadcast import refuse
from torchscout.replay.capture.context import autocast_as, buffers_of, preserved, preserved_rng, refusal
from torchscout.replay.capture.first_calls import TensorForm
from torchscout.replay.capture.form_pass import FormPass, is_sharded_only
from torchscout.replay.capture.hooks import WRITES, CallCapture
from torchscout.replay.capture.invocation import Invocation, is_floating, tensors_in
from torchscout.utils._torch import compiler

__all__ = ["CompiledCode", "EagerCall", "FormCall", "compiled_around", "eagerly", "is_compiled"]

_MAX_PASSES = 3
"""Eager passes over one compiled module. One is enough if it succeeds and calls every target."""


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or a part of it, runs as compiled code."""
    return compiler() is not None and any(map(_is_compiled_itself, module.modules()))


def compiled_around(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """Return the outermost compiled module of ``model`` that contains this module, or None."""
    if compiler() is None:
        return None
    compiled = (each for each in model.modules() if each is not module and _is_compiled_itself(each))
    return next((each for each in compiled if any(part is module for part in each.modules())), None)


def eagerly() -> AbstractContextManager[None]:
    """Run everything eagerly in this block, including what is already compiled."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class CompiledCode:
    """The compiled modules of one model, with the calls saved for modules inside them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._targets: dict[nn.Module, None] = {}
        self._found: dict[nn.Module, _Compiled] = {}
        self._passes: dict[nn.Module, FormPass] = {}
        """Of compiled modules with sharded parameters."""

    def expect(self, modules: Iterable[nn.Module]) -> None:
        """Declare that these modules are replayed, so that one eager pass saves the inputs of all of them."""
        self._targets.update(dict.fromkeys(modules))

    def is_inside(self, module: nn.Module) -> bool:
        """Whether the module is inside compiled code, where hooks do not run."""
        return compiled_around(self._model, module) is not None

    def has_inside(self, module: nn.Module) -> bool:
        """Whether the module is inside compiled code, and its input can be found without communication."""
        around = compiled_around(self._model, module)
        return around is not None and (not _has_shards(around) or is_sharded_only(around))

    def start(self, module: nn.Module) -> None:
        """Note the first call of the compiled module around this one, if an eager pass would communicate."""
        around = compiled_around(self._model, module)
        if (
            around is not None
            and _has_shards(around)
            and around not in self._passes
            and self.has_inside(module)
        ):
            self._passes[around] = FormPass(around, self._targets, self._device)

    def close(self) -> None:
        for each in self._passes.values():
            each.close()

    def call_of(self, module: nn.Module, *, is_source: bool) -> EagerCall | FormCall:
        """Return the call of a module inside compiled code."""
        around = compiled_around(self._model, module)
        assert around is not None, "it is inside"
        if around in self._passes:
            return FormCall(self._passes[around], module, is_source=is_source)
        if around not in self._found:
            self._found[around] = _Compiled(around, self._targets, self._device)
        return EagerCall(self._found[around], module, is_source=is_source)


class EagerCall:
    """The call of one module inside compiled code; used in place of a ``CallCapture``."""

    def __init__(self, compiled: _Compiled, module: nn.Module, *, is_source: bool) -> None:
        self._compiled, self._module, self._is_source = compiled, module, is_source
        compiled.arm(module)

    def invocation(self) -> Invocation:
        """Return the saved call, after an eager pass if necessary; raise ``ReplayError`` if there is none."""
        saved = self._compiled.saved(self._module)
        if not self._is_source:
            return saved.call
        return replace(saved.call, gradients=saved.gradients(self._compiled.device))

    def disarm(self) -> None:
        """Remove the hooks."""
        self._compiled.disarm()


class FormCall:
    """The made-up call of one module inside a compiled module with sharded parameters."""

    def __init__(self, forms: FormPass, module: nn.Module, *, is_source: bool) -> None:
        self._forms, self._module, self._is_source = forms, module, is_source

    def invocation(self) -> Invocation:
        """Raise ``ReplayError`` with the reason if there is none."""
        form = self._forms.form_of(self._module)
        return form.made_up(self._forms.device, is_source=self._is_source)

    def disarm(self) -> None:
        """The hooks remove themselves after the first call."""


class _ArgumentsOnly(CallCapture):
    """Keeps no gradients: those of a whole model's output may be large, and are not needed."""

    def _await_gradient(self, begun: Invocation, place: int, tensor: torch.Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Saved:
    """The saved input of one module."""

    call: Invocation
    """The call without gradients; shared by modules of one kind."""
    outputs: Mapping[int, TensorForm]
    """The output's tensors that require gradients, by place."""

    def gradients(self, device: torch.device) -> dict[int, torch.Tensor]:
        forms = self.outputs.items()
        return {place: form.random(device, place, is_gradient=True) for place, form in forms}


class _Compiled:
    """One compiled module, with the calls saved for modules inside it."""

    def __init__(self, module: nn.Module, targets: Mapping[nn.Module, None], device: torch.device) -> None:
        self.device = device
        self._module, self._targets = module, targets
        self._capture: CallCapture | None = None
        self._passes = 0
        self._problem = "the eager pass over the compiled module around it did not call it with gradients"
        self._kinds: dict[tuple[Any, ...], Invocation] = {}
        self._open: dict[nn.Module, Invocation] = {}
        """Calls in progress in the eager pass."""
        self._saved: dict[nn.Module, _Saved] = {}

    def arm(self, target: nn.Module) -> None:
        """Capture training's next call, if nothing is saved for the target and another pass is allowed."""
        if target not in self._saved and self._passes < _MAX_PASSES and self._capture is None:
            # An eager pass runs inside of DDP, and does not repeat its communication.
            around = [each for each in _wrappers(self._module) if isinstance(each, DistributedDataParallel)]
            expected = [rank for each in around for rank in get_process_group_ranks(each.process_group)]
            self._capture = _ArgumentsOnly(self._module, self.device, keep=True, expected=expected)

    def disarm(self) -> None:
        if self._capture is not None:
            self._capture.disarm()
            self._capture = None

    def saved(self, target: nn.Module) -> _Saved:
        # One pass serves all targets that are due together. Without hooks, it has finished or failed.
        if target not in self._saved and self._capture is not None:
            self._run_eagerly(self._captured(self._capture))
            self.disarm()
        if target not in self._saved:
            raise ReplayError(self._problem)
        return self._saved[target]

    def _captured(self, capture: CallCapture) -> Invocation:
        try:
            return capture.invocation()
        except ReplayError as error:
            raise ReplayError(f"the compiled module around it cannot be run eagerly: {error}") from error

    def _run_eagerly(self, call: Invocation) -> None:
        """Repeat the captured call without any effect on training, and without keeping activations."""
        inside = [*_wrappers(self._module)][-1]
        if (found := refusal(inside) or _synchronizing(inside)) is not None:
            raise ReplayError(f"the compiled module around it cannot be run eagerly: {found}")
        self._passes += 1
        leaves = enumerate(zip(call.leaves, call.requires_grad, strict=True))
        given = {
            place: leaf.requires_grad_(needs).clone()
            for place, (leaf, needs) in leaves
            if isinstance(leaf, torch.Tensor)
        }
        args, kwargs = call.arguments(given)
        versions = [each._version for each in inside.parameters()]
        with ExitStack() as around:
            around.push(self._remember)
            around.enter_context(preserved_rng(self.device))
            around.enter_context(preserved(inside, buffers_of(inside), call.randomness.seed))
            around.enter_context(call.attention.applied())
            around.enter_context(eagerly())
            around.enter_context(autocast_as(call.autocast))
            # Needed to know which tensors require gradients; tensors saved for backward are dropped.
            around.enter_context(torch.enable_grad())
            around.enter_context(saved_tensors_hooks(lambda _: None, _never))
            self._watch(inside, around)
            call.randomness.apply(self.device)
            inside(*args, **kwargs)
            if versions != [each._version for each in inside.parameters()]:
                raise ReplayError(WRITES)

    def _watch(self, inside: nn.Module, around: ExitStack) -> None:
        parts = {*inside.modules()}
        around.callback(self._open.clear)
        for target in self._targets:
            if target in parts:
                before = target.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
                after = target.register_forward_hook(self._after)
                around.callback(before.remove)
                around.callback(after.remove)

    def _before(self, target: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            call = Invocation.of(args, kwargs, self.device, keep=True)
            shapes = tuple((name, each.shape) for name, each in target.named_parameters())
            kind = (type(target), shapes, json.dumps(call.describe()))
            self._open[target] = self._kinds.setdefault(kind, call)

    def _after(self, target: nn.Module, _: Any, output: Any) -> None:
        if (call := self._open.pop(target, None)) is None:
            return
        tensors = enumerate(tensors_in(output))
        needing = {place: each for place, each in tensors if each.requires_grad and is_floating(each)}
        for each in needing.values():
            refuse(each)
        self._saved[target] = _Saved(call, {place: TensorForm.of(each) for place, each in needing.items()})

    def _remember(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Remember why a pass failed, for later checks."""
        if isinstance(error, Exception):
            self.disarm()
            failed = "the eager pass over the compiled module around it failed"
            self._problem = f"{failed}: {describe_error(error)}"


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(each, DTensor) for each in module.parameters())


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and what it wraps (as compiler or DDP), outermost first."""
    yield module
    if isinstance(module, DistributedDataParallel):
        yield from _wrappers(module.module)
    elif compiler() is not None and isinstance(module, compiler().OptimizedModule):
        yield from _wrappers(module._orig_mod)


def _synchronizing(module: nn.Module) -> str | None:
    """Return why an eager pass would communicate, or leave state that expects a backward pass; else None."""
    for name, each in module.named_modules():
        # The method is that of FSDP2 and of ``replicate``.
        if isinstance(each, DistributedDataParallel) or hasattr(each, "set_requires_gradient_sync"):
            return f"{name or 'it'} synchronizes gradients, and would count an eager pass as training's"
    return None


def _is_compiled_itself(module: nn.Module) -> bool:
    return (
        isinstance(module, compiler().OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")  # a compiled method
    )


def _never(_: Any) -> Any:
    raise AssertionError("an eager pass has no backward pass")
