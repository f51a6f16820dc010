"""Captures one call of a module during one training step (paper, section 6.1).

Hooks exist only in a step at whose end the module is due. The last call that received gradients counts: of
gradient accumulation the last microbatch, and never an evaluation. Calls that activation checkpointing
repeats during backward are not captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchscout.errors import ReplayError, describe_error
from torchscout.replay.capture.broadcast import DTensorLayout, captured, obstacle
from torchscout.replay.capture.context import buffers_of
from torchscout.replay.capture.invocation import Invocation, tensors_in
from torchscout.replay.guard import Communication
from torchscout.utils.cuda_graphs import has_compiled_graphs, is_capturing
from torchscout.utils.reentrancy import in_backward, in_own_work

__all__ = ["WRITES", "CallCapture"]

WRITES = "its forward pass writes to its own parameters"
"""Why a module is not replayed: another call would change training."""
_RESIZED = (
    "a tensor among its attributes had another shape in the context_parallel block, which shards it for "
    "the length of the block; a registered buffer is captured, an attribute is not"
)
_NOT_CALLED = (
    "it was not called in this step, or only inside compiled code, in which replay finds a module only if "
    "the compiled module is part of the model passed to torchscout and its parameters are not sharded"
)
_WITHOUT_GRADIENTS = (
    "it was called only without gradients: in an evaluation, or by activation checkpointing with "
    "use_reentrant=True, which replay does not support; use_reentrant=False is supported"
)


_LARGE_BYTES, _LARGE_RATIO = 64 << 20, 4
"""A gradient of more bytes than this, and of so many times the bytes of the inputs, is not sent to peers:
sending that of a vocabulary takes longer than computing with it. Any gradient serves if all peers use the
same one."""


class MadeUp(Protocol):
    """Makes up a call: see ``first_calls``."""

    def made_up(self, *, is_source: bool) -> Invocation: ...


class CallCapture:
    """Captures calls from construction until ``disarm``."""

    _in_graphs = False
    """Whether calls that a CUDA graph captures count."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        keep: bool,
        expected: Collection[int] = (),
        first: MadeUp | None = None,
    ) -> None:
        """A module that communicates beyond the ``expected`` ranks is not replayed. In a step without a call,
        as while a CUDA graph is replayed, ``first`` makes one up."""
        self._device, self._keep, self._first = device, keep, first
        self._communication = Communication(expected)
        self._begun: Invocation | None = None
        """The last call, whose output has not received gradients yet."""
        self._whole: Invocation | None = None
        """The last call whose output received gradients."""
        self._versions: dict[nn.Parameter, int] = {}
        """Version counters of the module's parameters during the call."""
        self._attributes: list[tuple[torch.Tensor, torch.Size]] = []
        """Tensors among the module's attributes, with their shapes in the call; see ``_in_block``."""
        self._problem = _NOT_CALLED
        self.is_armed = True
        """Until ``disarm``."""
        self._undo = ExitStack()
        self._undo.callback(self._communication.stop)
        self._arm(module)

    def invocation(self) -> Invocation:
        """Return the captured call; raise ``ReplayError`` with the reason if there is none."""
        found = self._whole or self._begun
        if found is None and self._first is not None and self._problem is _NOT_CALLED:
            return self._first.made_up(is_source=self._keep)
        if found is None:
            raise ReplayError(self._problem)
        if found.problem is not None:
            raise ReplayError(found.problem)
        if any(tensor.shape != shape for tensor, shape in self._attributes):
            raise ReplayError(_RESIZED)
        return found

    def disarm(self) -> None:
        """Remove the hooks and release the captured call."""
        self.is_armed = False
        self._undo.close()
        self._begun = self._whole = None
        self._versions, self._attributes = {}, []

    def _arm(self, module: nn.Module) -> None:
        if module._compiled_call_impl is None:
            # First in, last out: a replayed call runs all other hooks again.
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
            return
        # [Note: compiled in place] After `module.compile()` hooks are part of the compiled code, and new ones
        # are not called. The module calls an attribute instead of itself, which is wrapped meanwhile.
        captures = _compiled_in_place.setdefault(module, [])
        captures.append(self)
        if len(captures) == 1:
            _wrap_compiled(module, captures)
        self._undo.callback(_remove, module, self)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_trainings_own():
            return
        self._begun = None
        with self._quietly():
            self._versions = {each: each._version for each in module.parameters()}
            begun = Invocation.of(args, kwargs, self._device, keep=self._keep)
            if begun.attention.is_ring:
                self._in_block(module, begun)
            self._begun = begun
            self._communication.listen()

    def _in_block(self, module: nn.Module, begun: Invocation) -> None:
        """Keep buffers: ``context_parallel`` shards tensors in place and may restore them before a replay."""
        if self._keep:
            begun.buffers = {name: captured(each) for name, each in buffers_of(module).items()}
        kept = [each for part in module.modules() for each in vars(part).values()]
        self._attributes = [(each, each.shape) for each in kept if isinstance(each, torch.Tensor)]

    def _after(self, _: nn.Module, __: Any, ___: Any, output: Any) -> None:
        begun = self._begun
        if begun is None or not self._is_trainings_own():
            return
        versions, self._versions = self._versions, {}
        self._communication.stop()
        with self._quietly():
            if (found := self._communication.found) is not None:
                begun.problem = f"it issues {found}, which a replay must not repeat"
            if any(each._version != version for each, version in versions.items()):
                begun.problem = begun.problem or WRITES
            begun.problem = begun.problem or begun.hidden_tensors()
            for place, tensor in enumerate(tensors_in(output)):
                if (layout := DTensorLayout.of(tensor)) is not None:
                    begun.outputs[place] = layout
                if tensor.requires_grad:
                    self._await_gradient(begun, place, tensor)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  must not reach training's forward pass, in which this runs
            self._begun, self._problem = None, describe_error(error)

    def _await_gradient(self, begun: Invocation, place: int, tensor: torch.Tensor) -> None:
        def take(gradient: torch.Tensor) -> None:
            if (found := obstacle(gradient)) is not None:
                begun.problem = f"the gradient of its output is {found}"
                return
            self._whole = begun
            if _is_too_large(gradient, begun):
                begun.replaced = tuple(sorted({*begun.replaced, place}))
                return
            # Not copied: it must be the same on all peers, but not what training used. Autograd adds to a
            # gradient in place only if there is no other reference to it.
            is_lasting = not has_compiled_graphs(self._device)
            begun.gradients[place] = gradient.detach() if is_lasting else captured(gradient)

        if self._keep:
            # Removed later: a module may return a tensor that outlives the step, such as a weight.
            self._undo.callback(tensor.register_hook(take).remove)  # type: ignore[no-untyped-call]

    def _is_trainings_own(self) -> bool:
        if torch.compiler.is_compiling() or in_own_work() or in_backward():
            return False
        if is_capturing() and not self._in_graphs:  # a copy would become part of the user's graph
            return False
        if not torch.is_grad_enabled():
            if self._problem is _NOT_CALLED:  # an error in capturing training's own call is more important
                self._problem = _WITHOUT_GRADIENTS
            return False
        return True


_compiled_in_place: WeakKeyDictionary[nn.Module, list[CallCapture]] = WeakKeyDictionary()
"""The captures of modules that are compiled in place."""


def _wrap_compiled(module: nn.Module, captures: list[CallCapture]) -> None:
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in [*captures]:
            each._before(module, args, kwargs)
        output = compiled(*args, **kwargs)
        for each in [*captures]:
            each._after(module, args, kwargs, output)
        return output

    call.compiled = compiled  # type: ignore[attr-defined]
    module._compiled_call_impl = call


def _remove(module: nn.Module, capture: CallCapture) -> None:
    captures = _compiled_in_place[module]
    captures.remove(capture)
    if not captures:
        wrapper: Any = module._compiled_call_impl
        module._compiled_call_impl = wrapper.compiled


def _is_too_large(gradient: torch.Tensor, begun: Invocation) -> bool:
    """Applies to plain tensors only: a DTensor's gradient may be placed differently than the output."""
    inputs = sum(leaf.nbytes for leaf in begun.leaves if isinstance(leaf, torch.Tensor))
    is_large = gradient.nbytes > max(_LARGE_BYTES, _LARGE_RATIO * inputs)
    return is_large and DTensorLayout.of(gradient) is None
