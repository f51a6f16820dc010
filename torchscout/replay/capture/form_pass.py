"""Finds the form of every call inside a module, without computing anything (paper, section 6.1).

``torch.compile(model)`` over FSDP2 calls no hook of the layers inside, and an eager pass over the model would
gather all parameters. So the pass runs on the meta device: tensors with shapes and no values, full-size
parameters in place of shards, without the hooks by which FSDP gathers. Nothing is communicated, nothing of
training is called or compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from torchscout.errors import ReplayError
from torchscout.replay import fsdp_state
from torchscout.replay.capture.context import (
    Attention,
    RngState,
    autocast_as,
    autocast_now,
    buffers_of,
    preserved,
    preserved_rng,
)
from torchscout.replay.capture.first_calls import CallForm, FirstCall, TensorForm, forms_of, trained_outputs
from torchscout.replay.capture.invocation import Invocation, Omitted
from torchscout.replay.guard import attempt
from torchscout.utils._torch import compiler, tree_flatten

__all__ = ["FormPass", "is_sharded_only"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_sharded_only(module: nn.Module) -> bool:
    """Whether FSDP2 shards the parameters, and no other parallelism divides them."""
    divided = [each for each in module.parameters() if isinstance(each, DTensor)]
    has_root = any(isinstance(each, FSDPModule) for each in module.modules())
    return has_root and all(
        each.device_mesh.ndim == 1 or (each.device_mesh.ndim == 2 and each.placements[0].is_replicate())
        for each in divided
    )


class FormPass:
    """The forms of the calls inside one compiled module, found once, after its first call."""

    def __init__(self, module: nn.Module, targets: Mapping[nn.Module, None], device: torch.device) -> None:
        self.device = device
        self._module, self._targets = module, targets
        # Not repeated, so it may communicate.
        self._first = FirstCall(module, device, range(get_world_size()))
        self._forms: dict[nn.Module, CallForm] | None = None
        self._problem = "the compiled module around it did not call it"

    def close(self) -> None:
        self._first.disarm()

    def form_of(self, target: nn.Module) -> CallForm:
        """Return the form of the target's call; raise ``ReplayError`` if it cannot be determined."""
        if self._forms is None:
            outer, self._forms = self._first.form, {}
            _, problem = attempt(lambda: self._run(outer))
            if problem is not None:
                self._problem = f"the shapes inside compiled code are unknown: {problem}"
        if target not in self._forms:
            raise ReplayError(self._problem)
        return self._forms[target]

    def _run(self, outer: CallForm) -> None:
        inside = _unwrapped(self._module)
        given = {place: _shapes_only(form) for place, form in outer.inputs.items()}
        args, kwargs = outer.call.arguments(given)
        state = {name: _whole(each, inside, name) for name, each in inside.named_parameters()}
        state |= {name: torch.empty_like(each, device="meta") for name, each in inside.named_buffers()}
        eagerly = torch.compiler.set_stance("force_eager")
        with (
            preserved_rng(self.device),
            preserved(inside, buffers_of(inside), seed=0),
            eagerly,
            torch.enable_grad(),
            autocast_as(outer.call.autocast),
            _only_noting(inside, self._note, self._targets),
        ):
            functional_call(inside, state, args, kwargs)

    def _note(self, target: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        assert self._forms is not None, "the pass runs"
        leaves, spec = tree_flatten((args, kwargs))
        call = Invocation(
            [Omitted() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
            [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves],
            spec,
            autocast_now(self.device),
            RngState({}),
            Attention.now(),
        )
        inputs, outputs = forms_of((args, kwargs)), trained_outputs(output)
        self._forms[target] = CallForm(call, self._here(inputs), self._here(outputs))

    def _here(self, forms: Mapping[int, TensorForm]) -> dict[int, TensorForm]:
        """The same forms on this rank's device."""
        return {
            place: replace(form, description={**form.description, "device": self.device.type})
            for place, form in forms.items()
        }


@contextmanager
def _only_noting(model: nn.Module, note: Any, targets: Mapping[nn.Module, None]) -> Iterator[None]:
    """Let modules call ``note`` in this block, and none of their own hooks."""
    with ExitStack() as undo:
        for each in model.modules():
            for name in _HOOKS:
                hooks = getattr(each, name)
                undo.callback(hooks.update, hooks.copy())
                hooks.clear()
            if each in targets:
                undo.callback(each.register_forward_hook(note, with_kwargs=True).remove)
        yield


def _unwrapped(module: nn.Module) -> nn.Module:
    if compiler() is not None and isinstance(module, compiler().OptimizedModule):
        return _unwrapped(module._orig_mod)
    return module


def _whole(parameter: torch.Tensor, model: nn.Module, name: str) -> torch.Tensor:
    """A gathered parameter, as the forward pass has it."""
    owner = model
    dtype = fsdp_state.gathered_dtype(model)
    for part in name.split(".")[:-1]:
        owner = owner.get_submodule(part)
        dtype = fsdp_state.gathered_dtype(owner) or dtype
    whole = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device="meta")
    return whole.requires_grad_(parameter.requires_grad)


def _shapes_only(form: TensorForm) -> torch.Tensor:
    described = form.description
    dtype = getattr(torch, described["dtype"])
    return torch.empty_strided(described["size"], described["stride"], dtype=dtype, device="meta")
