"""Finds the experts of a mixture, and what of a layer is none (paper, sections 6.2 and 9).

Experts are known by their form, no list of names is consulted: several matrices of a module are stacked
alike, or a list of modules stands beside a router. A user may name them instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from torchscout.integration.modules import CONTAINERS, is_called, shape_of, unwrapped
from torchscout.integration.structure import Part, is_routed, plain_name

__all__ = ["experts_of", "without_experts"]


def experts_of(model: torch.nn.Module, named: str | Sequence[str] | None = None) -> tuple[Part, ...]:
    """What computes routed rows, in the order of registration: a stack of experts, or each one of a list.

    ``named`` are their paths, in which ``*`` stands for anything, such as a layer's number.
    """
    if named is not None:
        return _named(model, [named] if isinstance(named, str) else named)
    found: list[Part] = []
    inside: set[int] = set()
    for dotted, module in model.named_modules():
        if id(module) in inside:
            continue
        if members := _members(plain_name(dotted), module):
            found += members
            inside.update(id(each) for part in members for each in part.module.modules())
    return tuple(found)


def without_experts(layers: Sequence[Part], experts: Sequence[Part]) -> tuple[Part, ...]:
    """The layers, and in place of one with experts in it those of its parts that have none."""
    apart = {id(module) for part in experts for module in part.module.modules()}
    return tuple(each for layer in layers for each in _dense(layer, apart))


def _named(model: torch.nn.Module, patterns: Sequence[str]) -> tuple[Part, ...]:
    found: dict[str, Part] = {}
    for dotted, module in model.named_modules():
        name = plain_name(dotted)
        if is_called(module) and any(fnmatchcase(name, each) for each in patterns):
            found.setdefault(name, Part(name, module))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"experts={pattern!r} names no module of the model that is called; "
                "* stands for anything, as in 'layers.*.experts'"
            )
    return tuple(found.values())


def _members(name: str, module: torch.nn.Module) -> list[Part]:
    """The experts that a module is, or that the lists it owns hold."""
    if _is_stack(unwrapped(module)):
        return [Part(name, module)]
    return [
        Part(f"{name}.{path}.{place}" if name else f"{path}.{place}", expert)
        for path, child in unwrapped(module).named_children()
        if isinstance(unwrapped(child), CONTAINERS[:1]) and is_routed(module, child)
        for place, expert in unwrapped(child).named_children()
        if is_called(expert)
    ]


def _is_stack(module: torch.nn.Module) -> bool:
    """Whether all it has are matrices for several experts: two or more tensors of as many each."""
    shapes = [shape_of(each) for each in module.parameters(recurse=False)]
    stacked = [shape for shape in shapes if len(shape) == 3]
    return len(stacked) >= 2 and len({shape[0] for shape in shapes}) == 1 and is_called(module)


def _dense(part: Part, apart: set[int]) -> Iterator[Part]:
    if id(part.module) in apart or not any(True for _ in part.module.parameters()):
        return
    if is_called(part.module) and not any(id(each) in apart for each in part.module.modules()):
        yield part
        return
    for name, child in unwrapped(part.module).named_children():
        yield from _dense(Part(f"{part.name}.{name}", child), apart)
