"""Replays the optimizer's update of one slice of one parameter on every peer (paper, section 6.1.1).

The source's values from just before the real update are broadcast, each peer updates a clone, and the results
are compared with each other and with the result of the real update. The real optimizer's slots are compared
by ``replicated_state``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from torchscout.c3.fold import signed
from torchscout.c3.signature import PendingSignatures
from torchscout.decision.types import Surface
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
from torchscout.replay.recipe import ABSENT, Comparison, Mode, Observation, Recipe, Replay, SavedInput
from torchscout.replay.recipes.optimizer_clone import FAILURES, Blueprint, Parts, blueprint_of, build, update
from torchscout.replay.recipes.optimizer_slice import (
    SLICE,
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
from torchscout.utils.cuda_graphs import is_capturing
from torchscout.utils.reentrancy import is_nested_step

__all__ = ["REPRODUCED", "WHOLE_BUDGET", "OptimizerRecipe"]

WHOLE_BUDGET = 1 << 22
"""Elements of the largest parameter that is replayed whole, if a slice of it cannot be replayed."""
_COPIES = 8
"""Copies of a slice in one replay: parameter, gradient and slots, as received and as updated."""
REPRODUCED = signed(xxhash.xxh3_64_intdigest(b"torchscout: the replay gave what the real update gave"))
"""In place of a signature: the replay reproduced this rank's real update bit for bit."""

GRADIENT = 1
"""Index of the gradient among a blueprint's tensors."""
INPUT = Surface("optimizer/input")
PARAMETER = Surface("optimizer/param")
UPDATE = Surface("optimizer/update")
REPRODUCTION = Surface("optimizer/reproduced")


class OptimizerRecipe(Recipe):
    """Updates of the given parameters, except for those that no optimizer updates."""

    is_swept = True

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
        # ZeRO gives its optimizer what this rank owns only during the update; what it computes from that,
        # such as the shards of a model, requires no gradient.
        default = optimizers[0] if owned and len(optimizers) == 1 and not owners else None
        owners |= {id(each): default for each in parameters.values() if default and each.requires_grad}
        self._targets = [
            _Target(kind, name, parameter, optimizer)
            for name, parameter in parameters.items()
            if not _is_frozen(parameter) and (optimizer := owners.get(id(parameter))) is not None
        ]
        self.targets = tuple(each.name for each in self._targets)
        self._device = device
        self._is_owned = owned
        """Whether each rank is the only owner of its part: its own result is then compared with what its
        peers compute from the same values."""
        self.is_owned: Callable[[Surface], bool] = lambda _: False
        """Whether a parameter differs among peers by design."""
        self._begun: Counter[int] = Counter()
        self._separability = Separability()
        self.communication = {each.optimizer: StepCommunication(each.optimizer) for each in self._targets}

    def keep(self, names: Sequence[str]) -> None:
        """Replay only updates of these parameters, in this order."""
        self._targets = [each for name in names for each in self._targets if each.name == name]
        self.targets = tuple(names)

    def recomputed(self, refused: Collection[str]) -> list[Optimizer]:
        """Return the optimizers whose updates are replayed, given the surfaces that are never replayed."""
        owners = (each.optimizer for each in self._targets if f"{each.name}/{self.kind}" not in refused)
        return [each for each in owners if not self.communication[each].communicates]

    def gathered(self) -> dict[Surface, torch.Tensor]:
        """Return parameters of optimizers that communicate: ranks may receive what others have updated."""
        moved = [each for each in self._targets if self.communication[each.optimizer].communicates]
        return {each.name: each.parameter for each in moved}

    def start(self) -> None:
        for each in self.communication.values():
            each.start()

    def close(self) -> None:
        for each in self.communication.values():
            each.close()

    def swept_bytes(self, target: int) -> int:
        parameter = self._targets[target].parameter
        numel = parameter.numel() if parameter.numel() <= WHOLE_BUDGET else SLICE
        return numel * parameter.element_size() * _COPIES

    def new_replay(self, target: int, is_source: bool, saved: SavedInput | None, /) -> OptimizerReplay:
        """Take the target's next slice: from the next step or, in a sweep, from its present values."""
        updated, is_swept = self._targets[target], saved is not None
        communication = self.communication[updated.optimizer]
        if not is_swept and self.is_owned(updated.name):
            raise ReplayError("it differs among peers by design")
        replay = OptimizerReplay(
            updated, self._device, is_source=is_source, owned=self._is_owned, swept=is_swept
        )
        if is_swept:
            communication.refuse()
            replay.take(
                self._separability.obstacle(updated.optimizer, updated.parameter), self._begun[target]
            )
        else:
            replay.watch(self._separability, self._begun[target], communication)
            self._begun[target] += 1
        return replay


@dataclass(frozen=True, slots=True)
class _Target:
    """One parameter and its optimizer."""

    kind: str
    name: str
    parameter: torch.Tensor
    optimizer: Optimizer

    def local(self) -> torch.Tensor:
        return local_of(self.parameter, self.parameter)

    def parts(self, *, swept: bool = False) -> Parts:
        """Return this rank's parameter, gradient and state; in a sweep, the parameter also as gradient."""
        gradient = self.parameter.detach() if swept else self.parameter.grad
        if gradient is None:
            raise ReplayError(f"{self.name} had no gradient when the optimizer stepped")
        parts = Parts(
            parameter=self.local(),
            gradient=gradient_of(gradient, self.parameter),
            state={
                name: local_of(value, self.parameter) if isinstance(value, torch.Tensor) else value
                for name, value in self._state().items()
            },
        )
        refuse(parts.gradient)
        if not parts.parameter.numel():
            raise ReplayError(f"{self.name} has no elements on this rank")
        return parts

    def is_due(self) -> bool:
        """Whether the optimizer is about to update it: ZeRO passes it one group at a time."""
        groups = self.optimizer.param_groups
        return any(each is self.parameter for group in groups for each in group["params"])

    def unreduced(self) -> torch.Tensor | None:
        """Return a copy of this rank's summand, if ranks have not added up the gradient yet."""
        gradient = self.parameter.grad
        is_sum = gradient is not None and is_unreduced(gradient, self.parameter)
        return captured(gradient) if gradient is not None and is_sum else None

    def _state(self) -> Mapping[str, Any]:
        state = self.optimizer.state.get(self.parameter, {})
        if not isinstance(state, Mapping):
            raise ReplayError(f"{type(self.optimizer).__name__} keeps a {type(state).__name__} as state")
        return state

    def slice(self, parts: Parts, count: int, obstacle: str | None) -> Slice:
        """Return the slice after ``count`` others, or the whole parameter if ``obstacle`` prevents that."""
        parameter = parts.parameter
        if obstacle is not None and parameter.shape != self.parameter.shape:
            raise ReplayError(f"{obstacle}, and this rank has only a part of {self.name}")
        shaped = [
            parameter,
            parts.gradient,
            *(slot for slot in parts.state.values() if _fits(slot, parameter)),
        ]
        if obstacle is None and all(is_dense(t) and t.stride() == parameter.stride() for t in shaped):
            return nth_slice(parameter.numel(), count)
        if parameter.numel() > WHOLE_BUDGET:
            reason = obstacle or f"{self.name} and its gradient or state have different strides"
            raise ReplayError(f"{reason}, and {parameter.numel()} elements are too many to replay as a whole")
        return whole_of(parameter)


class OptimizerReplay(Replay):
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
        """With ``swept`` there is no real update to capture or to compare with."""
        self._target, self._device = target, device
        self._is_source, self._is_owned, self._is_swept = is_source, owned, swept
        self._failure: str | None = f"the optimizer did not step {target.name} in this training step"
        self._hook: Any = None
        self._captured: tuple[Slice, Blueprint] | None = None
        self._descriptions: dict[str, Any] = {}
        self._tensors: list[torch.Tensor] = []
        self._communication: StepCommunication | None = None
        self._separability: Separability | None = None
        """Used to determine whether the captured slice can be updated alone, if that is not known yet."""
        self._unreduced: torch.Tensor | None = None
        """This rank's summand of the gradient, if ranks have not added it up yet."""

    def watch(self, separability: Separability, count: int, communication: StepCommunication) -> None:
        """Capture every step of the optimizer until ``describe``; the last one counts."""
        target, obstacle = self._target, None
        self._communication = communication
        try:
            communication.refuse()
            communication.observe_next()
            # Before a step was observed, a clone is not tried: it might communicate.
            may_try = communication.may_be_tried
            if is_known := may_try and target.is_due():
                obstacle = separability.obstacle(target.optimizer, target.parameter)
        except ReplayError as failure:
            self._failure = str(failure)
            return

        def before_update(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_nested_step(target.optimizer) or not target.is_due() or is_capturing():
                return
            try:
                found = obstacle
                if may_try and not is_known:
                    found = separability.obstacle(target.optimizer, target.parameter)
                self._capture(args, kwargs, count, found)
                self._separability = None if may_try else separability
            except FAILURES as failure:  # must not reach training
                self._failure = describe_error(failure)

        self._hook = target.optimizer.register_step_pre_hook(before_update)

    def take(self, obstacle: str | None, count: int) -> None:
        """Capture the present values."""
        self._capture((), {}, count, obstacle)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, obstacle: str | None
    ) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise ReplayError("the optimizer received a closure, which may compute a different gradient")
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
        self._captured = part, blueprint
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
        part, kind = self._slice, self._blueprint.kind
        if self._separability is not None and not part.whole:
            obstacle = self._separability.obstacle(self._target.optimizer, self._target.parameter)
            if obstacle is not None:
                raise ReplayError(f"{obstacle}, so it is replayed as a whole from the next check on")
        return {
            "class": {"of the optimizer": f"{kind.__module__}.{kind.__qualname__}"},
            "slice": {self._target.name: [part.start, part.end, part.whole]},
            "setting": self._blueprint.settings(),
            "tensor": self._descriptions,
        }

    def prepare(self, descriptions: Sequence[Any], source: int, /) -> None:
        # Owned parts of one parameter may have different sizes.
        alike = ("class", "setting") if self._is_owned else tuple(descriptions[source])
        first = {id(each): peer for peer, each in reversed([*enumerate(descriptions)])}  # equal ones are one
        for peer, part in itertools.product(sorted(first.values()), alike):
            found, expected = descriptions[peer][part], descriptions[source][part]
            for key in sorted(found.keys() | expected.keys()):
                here, there = found.get(key), expected.get(key)
                if here != there:
                    raise ReplayError(f"{part} {key!r} differs: {here} on peer {peer}, {there} on the source")
        if not self._is_source:
            wanted = descriptions[source]["tensor"].values()
            self._tensors = [room_for(description, self._device) for description in wanted]

    def align(self, broadcast: Broadcast, /) -> None:
        if self._unreduced is not None:
            # Not in the hook: only here do all ranks that have a summand take part.
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
        # A single owner's result is compared with what its peers compute, which must agree, and repeat,
        # first.
        computed = (PARAMETER,) if self._is_owned else ()
        unscaled = "there is no real update with a scaled gradient"
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

    def observe(self, seen: Observation) -> None:
        seen.sign_as_one(INPUT, self._tensors)
        clone, leaf = build(self._blueprint, self._tensors)
        if seen.variant != 1.0 and leaf.grad is not None:
            leaf.grad.mul_(seen.variant)
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
        has_real = seen.variant == 1.0 and not self._is_swept

        def fill(found: list[int]) -> None:
            parameter, real_result, *of_slots = found
            seen.signatures.update(absent)
            seen.signatures[PARAMETER] = parameter
            seen.signatures.update(zip(slots, of_slots, strict=True))
            if has_real:
                seen.signatures[UPDATE] = real_result
                seen.signatures[REPRODUCTION] = REPRODUCED if real_result == parameter else ABSENT

        seen.when_signed(PendingSignatures([leaf.detach(), real, *slots.values()]), fill)

    def release(self) -> None:
        self._unhook()
        self._captured = self._unreduced = None
        self._tensors, self._descriptions = [], {}

    @property
    def _slice(self) -> Slice:
        assert self._captured is not None, "captured first"
        return self._captured[0]

    @property
    def _blueprint(self) -> Blueprint:
        assert self._captured is not None, "captured first"
        return self._captured[1]

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _slot_surfaces(self) -> dict[str, Surface]:
        """Return surfaces of slots that existed before the step; a first step creates them."""
        return {name: Surface(f"optimizer/slot.{name}") for name in self._blueprint.slots}


def _is_frozen(parameter: torch.Tensor) -> bool:
    """Whether it is never updated. A master copy, which is no ``Parameter``, requires no gradient either."""
    return isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad


def _fits(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
