"""The optimizer's update of one slice of one parameter, once more on every peer (paper, section 6.1.1).

The source's values from just before the real update are broadcast, each peer updates a clone, and
the results are compared with one another and with what the real update left behind. Slots of the real
optimizer are not compared here: a census of all state does that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from torchscout.decision.fold import signed
from torchscout.decision.record import Surface
from torchscout.decision.signature import PendingSignatures
from torchscout.errors import ReplayError, describe_error
from torchscout.mesh import LayerKind
from torchscout.replay.capture.broadcast import (
    Broadcast,
    captured,
    described,
    is_dense,
    receive,
    refuse,
    room_for,
)
from torchscout.replay.guard import StepCommunication
from torchscout.replay.recipe import ABSENT, Comparison, Given, Mode, Observation
from torchscout.replay.recipes.optimizer_clone import FAILURES, Blueprint, Parts, blueprint_of, build, update
from torchscout.replay.recipes.optimizer_slice import (
    Separability,
    Slice,
    gradient_of,
    is_unreduced,
    local_of,
    nth_slice,
    reduce,
    whole_of,
)
from torchscout.replay.timing import timed
from torchscout.utils.reentrancy import is_nested_step

__all__ = ["REPRODUCED", "WHOLE_BUDGET", "OptimizerRecipe"]

WHOLE_BUDGET = 1 << 22
"""Elements of the largest parameter that is replayed whole, where a slice of it cannot be."""
REPRODUCED = signed(xxhash.xxh3_64_intdigest(b"torchscout: the replay gave what the real update gave"))
"""In place of a signature: this rank's real result is bitwise the replayed one."""

GRADIENT = 1
"""Its place among a blueprint's tensors."""
INPUT = Surface("optimizer/input")
PARAMETER = Surface("optimizer/param")
UPDATE = Surface("optimizer/update")
REPRODUCTION = Surface("optimizer/reproduced")


class OptimizerRecipe:
    """Replays updates of the given parameters; those that nobody optimizes are left out."""

    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = True
    is_required = True

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        owned: bool = False,
        kind: str = "optimizer",
        role: LayerKind = LayerKind.DENSE,
    ) -> None:
        self.kind, self.role = kind, role
        owners = {
            id(member): optimizer
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for member in group["params"]
        }
        # ZeRO shows its optimizer what this rank owns only while that is updated; what is made from it then,
        # as the shards of a model, asks for no gradient.
        default = optimizers[0] if owned and len(optimizers) == 1 and not owners else None
        owners |= {id(each): default for each in parameters.values() if default and each.requires_grad}
        self._owned = [
            _Target(kind, name, parameter, optimizer)
            for name, parameter in parameters.items()
            if not _is_frozen(parameter) and (optimizer := owners.get(id(parameter))) is not None
        ]
        self.targets = tuple(owned.name for owned in self._owned)
        self._device = device
        self._is_owned = owned
        """Whether each rank is the only one to hold its part: then its own result is held against what its
        peers compute from the same values."""
        self.is_owned: Callable[[Surface], bool] = lambda _: False  # by design, on each peer another one
        self._begun: Counter[int] = Counter()
        self._separability = Separability()
        stepping = dict.fromkeys(each.optimizer for each in self._owned)
        self.communication = {each: StepCommunication(each) for each in stepping}

    def keep(self, names: Sequence[str]) -> None:
        """Replay updates of these parameters only, in this order."""
        self._owned = [each for name in names for each in self._owned if each.name == name]
        self.targets = tuple(names)

    def recomputed(self, refused: Collection[str]) -> list[Optimizer]:
        """Those of which an update is, or will be, where ``refused`` has what is never replayed."""
        owners = (each.optimizer for each in self._owned if f"{each.name}/{self.kind}" not in refused)
        return [each for each in owners if not self.communication[each].communicates]

    def gathered(self) -> dict[Surface, torch.Tensor]:
        """Parameters of optimizers that communicate: what one rank makes of its own, all may receive."""
        moved = [each for each in self._owned if self.communication[each.optimizer].communicates]
        return {each.name: each.parameter for each in moved}

    def start(self) -> None:
        for each in self.communication.values():
            each.start()

    def close(self) -> None:
        for each in self.communication.values():
            each.close()

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> OptimizerReplay:
        """From now on, the owner's next step is captured; each time the target's next slice of it."""
        if self.is_owned(self.targets[target]):
            raise ReplayError("peers hold different ones of it by design")
        replay = OptimizerReplay(self._owned[target], self._device, is_source=is_source, owned=self._is_owned)
        replay.watch(
            self._separability, self._begun[target], self.communication[self._owned[target].optimizer]
        )
        self._begun[target] += 1
        return replay

    def again(self, target: int, given: Given) -> OptimizerReplay:
        """The update of a slice as it is now; any gradient will do, as long as peers have the same."""
        owned = self._owned[target]
        self.communication[owned.optimizer].refuse()
        replay = OptimizerReplay(
            owned, self._device, is_source=given.is_source, owned=self._is_owned, swept=True
        )
        replay.take(self._separability.obstacle(owned.optimizer, owned.parameter), self._begun[target])
        return replay


@dataclass(frozen=True, slots=True)
class _Target:
    """One parameter and who updates it."""

    kind: str
    """Of the recipe."""
    name: str
    parameter: torch.Tensor
    optimizer: Optimizer

    def local(self) -> torch.Tensor:
        return local_of(self.parameter, self.parameter)

    def parts(self, *, swept: bool = False) -> Parts:
        """This rank's parameter, gradient (in a sweep the parameter again) and state, as they are."""
        gradient = self.parameter.detach() if swept else self.parameter.grad
        if gradient is None:
            raise ReplayError(f"{self.name} had no gradient when the optimizer stepped")
        parts = Parts(
            parameter=self.local(),
            gradient=gradient_of(gradient, self.parameter),
            state={name: self._slot(value) for name, value in self._state().items()},
        )
        refuse(parts.gradient)
        if not parts.parameter.numel():
            raise ReplayError(f"{self.name} has no elements on this rank")
        return parts

    def is_due(self) -> bool:
        """Whether the optimizer is about to update it: ZeRO lends its groups to the optimizer one by one."""
        groups = self.optimizer.param_groups
        return any(each is self.parameter for group in groups for each in group["params"])

    def unreduced(self) -> torch.Tensor | None:
        """A copy of this rank's summand, where the gradient is a sum yet to be made."""
        gradient = self.parameter.grad
        is_sum = gradient is not None and is_unreduced(gradient, self.parameter)
        return captured(gradient) if gradient is not None and is_sum else None

    def _slot(self, value: Any) -> Any:
        return local_of(value, self.parameter) if isinstance(value, torch.Tensor) else value

    def _state(self) -> Mapping[str, Any]:
        state = self.optimizer.state.get(self.parameter, {})
        if not isinstance(state, Mapping):
            raise ReplayError(f"{type(self.optimizer).__name__} keeps a {type(state).__name__} as state")
        return state

    def slice(self, parts: Parts, count: int, obstacle: str | None) -> Slice:
        """What of the parameter is due, after ``count`` others; all of it where ``obstacle`` says why."""
        parameter = parts.parameter
        if obstacle is not None and parameter.shape != self.parameter.shape:
            raise ReplayError(f"{obstacle}, and this rank holds only a part of {self.name}")
        shaped = [
            parameter,
            parts.gradient,
            *(slot for slot in parts.state.values() if _fits(slot, parameter)),
        ]
        if obstacle is None and all(is_dense(t) and t.stride() == parameter.stride() for t in shaped):
            return nth_slice(parameter.numel(), count)
        if parameter.numel() > WHOLE_BUDGET:
            reason = obstacle or f"{self.name} and its gradient or state lie differently in memory"
            raise ReplayError(f"{reason}, and {parameter.numel()} elements are too many to replay whole")
        return whole_of(parameter)


class OptimizerReplay:
    """One update of one slice."""

    def __init__(
        self,
        target: _Target,
        device: torch.device,
        *,
        is_source: bool,
        owned: bool = False,
        swept: bool = False,
    ) -> None:
        """``swept``: there is no real update to capture, or to compare with."""
        self._target = target
        self._device = device
        self._is_source, self._is_owned, self._is_swept = is_source, owned, swept
        self._failure: str | None = f"the optimizer did not step {target.name} in this training step"
        self._hook: Any = None
        self._slice: Slice | None = None
        self._blueprint: Blueprint | None = None
        self._descriptions: dict[str, Any] = {}
        self._tensors: list[torch.Tensor] = []
        self._communication: StepCommunication | None = None
        self._separability: Separability | None = None
        """To be asked whether the slice that was captured can be updated alone, if that is not known yet."""
        self._unreduced: torch.Tensor | None = None
        """This rank's summand of the gradient, where ranks have yet to add it up."""

    def watch(self, separability: Separability, count: int, communication: StepCommunication) -> None:
        """Capture at each step of the optimizer, until ``describe``; the last one counts."""
        target, obstacle = self._target, None
        self._communication = communication
        try:
            communication.refuse()
            communication.listen()
            # Nothing is tried on an optimizer that was never heard to step: it might communicate.
            may_try = communication.may_be_tried
            if is_known := may_try and target.is_due():
                obstacle = separability.obstacle(target.optimizer, target.parameter)
        except ReplayError as failure:
            self._failure = str(failure)
            return

        def before_update(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_nested_step(target.optimizer) or not target.is_due():
                return
            try:
                found = obstacle
                if may_try and not is_known:
                    found = separability.obstacle(target.optimizer, target.parameter)
                self._capture(args, kwargs, count, found)
                self._separability = None if may_try else separability
            except FAILURES as failure:  # training must not notice
                self._failure = describe_error(failure)

        self._hook = target.optimizer.register_step_pre_hook(before_update)

    def take(self, obstacle: str | None, count: int) -> None:
        """Capture what there is now."""
        self._capture((), {}, count, obstacle)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, obstacle: str | None
    ) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise ReplayError("the optimizer was given a closure, which may compute another gradient")
        parts = self._target.parts(swept=self._is_swept)
        part = self._target.slice(parts, count, obstacle)
        cut = Parts(
            parameter=part.of(parts.parameter),
            gradient=part.of(parts.gradient),
            state={
                name: part.of(slot) if _fits(slot, parts.parameter) else slot
                for name, slot in parts.state.items()
            },
        )
        blueprint, tensors = blueprint_of(self._target.optimizer, self._target.parameter, cut)
        self._slice, self._blueprint = part, blueprint
        self._descriptions = dict(zip(blueprint.names, map(described, tensors), strict=True))
        self._tensors = [captured(tensor) for tensor in tensors] if self._is_source else []
        self._unreduced = None if self._is_swept else self._target.unreduced()
        self._failure = None

    def describe(self) -> Any:
        self._unhook()
        if self._communication is not None:
            self._communication.refuse()
        if self._failure is not None:
            raise ReplayError(self._failure)
        assert self._blueprint is not None
        assert self._slice is not None
        if self._separability is not None and not self._slice.whole:
            obstacle = self._separability.obstacle(self._target.optimizer, self._target.parameter)
            if obstacle is not None:
                raise ReplayError(f"{obstacle}, so that it is replayed whole, from the next check on")
        kind = self._blueprint.kind
        return {
            "class": {"of the optimizer": f"{kind.__module__}.{kind.__qualname__}"},
            "slice": {self._target.name: [self._slice.start, self._slice.end, self._slice.whole]},
            "setting": self._blueprint.settings(),
            "tensor": self._descriptions,
        }

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        # Parts of one parameter that ranks own alone need not be equally large.
        alike = ("class", "setting") if self._is_owned else tuple(descriptions[source])
        for peer, description in enumerate(descriptions):
            _require_equal(description, descriptions[source], peer, alike)
        if not self._is_source:
            wanted = descriptions[source]["tensor"].values()
            self._tensors = [room_for(description, self._device) for description in wanted]

    def align(self, broadcast: Broadcast) -> None:
        if self._unreduced is not None:
            assert self._slice is not None
            # Not in the hook: only here is it sure that all who hold a summand come, sources or not.
            whole = reduce(self._unreduced, self._target.parameter)
            if self._is_source:
                self._tensors[GRADIENT].copy_(self._slice.of(whole))
        receive(self._tensors, broadcast)

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return "", (self._tensors[0].numel(),)

    def comparisons(self) -> Sequence[Comparison]:
        results = [PARAMETER, *self._slot_surfaces().values()]
        replayed = [
            Comparison(INPUT, Mode.INPUT),
            *(Comparison(surface, Mode.OPTIMIZER, premises=(INPUT,)) for surface in results),
        ]
        if self._is_swept:
            return replayed
        # The only owner's result is held against what its peers compute, which must agree, and repeat, first.
        computed = (PARAMETER,) if self._is_owned else ()
        unscaled = "there is no real update of a gradient that was scaled for replay"
        return [
            *replayed,
            Comparison(UPDATE, Mode.STATE, premises=computed, absent=unscaled),
            Comparison(
                REPRODUCTION,
                Mode.OPTIMIZER,
                premises=(INPUT,),
                absent="the replayed update does not reproduce the real one on any peer",
            ),
        ]

    def observe(self, variant: float, seen: Observation) -> None:
        assert self._blueprint is not None
        assert self._slice is not None
        seen.sign_as_one(INPUT, self._tensors)
        clone, leaf = build(self._blueprint, self._tensors)
        if variant != 1.0 and leaf.grad is not None:
            leaf.grad.mul_(variant)
        time = f"time/{self._target.kind}"
        with timed(self._device, seen, work=time, communication=time + "_{}@"):
            update(clone, leaf.device)
        state = clone.state[leaf]
        slots = {
            surface: state[name]
            for name, surface in self._slot_surfaces().items()
            if isinstance(state.get(name), torch.Tensor)
        }
        has_result = self._is_source or not self._is_owned
        real = self._slice.of(self._target.local()) if has_result else leaf.detach()
        absent = dict.fromkeys((each.surface for each in self.comparisons() if each.surface != INPUT), ABSENT)
        has_real = variant == 1.0 and not self._is_swept

        def fill(found: list[int]) -> None:
            parameter, left_behind, *of_slots = found
            seen.signatures.update(absent)
            seen.signatures[PARAMETER] = parameter
            seen.signatures.update(zip(slots, of_slots, strict=True))
            if has_real:
                seen.signatures[UPDATE] = left_behind
                seen.signatures[REPRODUCTION] = REPRODUCED if left_behind == parameter else ABSENT

        seen.when_signed(PendingSignatures([leaf.detach(), real, *slots.values()]), fill)

    def invocation(self) -> None:
        """A sweep updates what it finds."""

    def release(self) -> None:
        self._unhook()
        self._blueprint = self._slice = None
        self._tensors, self._descriptions, self._unreduced = [], {}, None

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _slot_surfaces(self) -> dict[str, Surface]:
        """Only of slots that were there before: what a first step creates is compared from the second on."""
        assert self._blueprint is not None
        return {name: Surface(f"optimizer/slot.{name}") for name in self._blueprint.slots}


def _is_frozen(parameter: torch.Tensor) -> bool:
    """A copy that an optimizer updates in a parameter's place never asks for gradients; it is given them."""
    return isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad


def _fits(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _require_equal(
    description: Mapping[str, Any], source: Mapping[str, Any], peer: int, kinds: Sequence[str]
) -> None:
    for kind in kinds:
        found, expected = description[kind], source[kind]
        for key in sorted(found.keys() | expected.keys()):
            here, there = found.get(key), expected.get(key)
            if here != there:
                raise ReplayError(f"{kind} {key!r} differs: {here} on peer {peer}, {there} on the source")
