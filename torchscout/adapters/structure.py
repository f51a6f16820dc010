"""Finds embeddings, repeated layers, output layer and experts in a model (paper, sections 6.1, 6.2, 9).

Modules are recognized by their structure, not by their names, and none is called. Experts are several stacked
matrices of the same number, or a list of modules beside a router. A user may name them instead.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from torchscout.adapters.modules import (
    CALLED_AS_ONE,
    CONTAINERS,
    WRAPPERS,
    is_called,
    is_matrix,
    is_plain,
    is_table,
    kind_of,
    rows_of,
    shape_of,
    unwrapped,
    wrapped,
)

__all__ = [
    "Part",
    "Structure",
    "experts_of",
    "is_routed",
    "layers_of",
    "plain_name",
    "structure_of",
    "surface_of",
    "without_experts",
]


@dataclass(frozen=True, slots=True)
class Part:
    """One module that replay can call."""

    name: str
    """Dotted path without the components that wrappers add; ``model`` for the model itself."""
    module: torch.nn.Module
    """The module that training calls: the outermost wrapper, if there are any."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of a model, in the order of registration."""

    embeddings: tuple[Part, ...]
    """Embeddings of tokens, positions and the like."""
    layers: tuple[Part, ...]
    """The repeated hidden layers; the model itself if nothing repeats."""
    outputs: tuple[Part, ...]
    """The output layer, or several heads. Empty if the head is not a module, or on another stage."""


def structure_of(
    model: torch.nn.Module,
    *,
    embedding: str | None = None,
    layers: str | Sequence[str] | None = None,
    output: str | None = None,
) -> Structure:
    """Return the parts of a model; those that the user names by path are used as they are.

    Raises ``ValueError`` if a path does not exist, or if the output layer is ambiguous.
    """
    hidden = layers_of(model, layers)
    parts = _parts(model)
    before, after = _around(parts, [each.module for each in _wholes(model).values()], hidden)
    outside = [*before, *after]
    embeddings = (
        [part for part in outside if is_table(part.module)]
        if embedding is None
        else [_named(parts, "embedding", embedding)]
    )
    outputs = _outputs(embeddings, outside, after) if output is None else [_named(parts, "output", output)]
    return Structure(tuple(embeddings), hidden, tuple(outputs))


def layers_of(model: torch.nn.Module, layers: str | Sequence[str] | None = None) -> tuple[Part, ...]:
    """Return the hidden layers only, so that an ambiguous output layer does no harm."""
    if layers is None:
        vocabulary = max((rows_of(each) for each in model.modules() if is_table(each)), default=0)
        found = [
            layer
            for path, whole in _wholes(model).items()
            for layer in _repeated(path, whole.module, vocabulary) or [whole]
        ]
    else:
        found = _named_layers(_parts(model), layers)
    once: dict[int, Part] = {}
    for layer in found:
        once.setdefault(id(unwrapped(layer.module)), layer)
    return tuple(once.values())


def plain_name(dotted: str) -> str:
    """A dotted path without the components that wrappers add."""
    components = [each for each in dotted.split(".") if each not in WRAPPERS]
    while components[:1] == ["module"]:
        del components[0]
    return ".".join(components)


def surface_of(parameter_name: str) -> str:
    """The surface of a parameter: ``layer.2.up.weight`` is ``layer.2.up/weight``."""
    owner, _, name = plain_name(parameter_name).rpartition(".")
    return f"{owner or 'model'}/{name}"


def _parts(model: torch.nn.Module) -> dict[str, Part]:
    """The outermost module of every plain name, in the order of registration."""
    parts: dict[str, Part] = {}
    for dotted, module in _whole("", model).module.named_modules():
        name = plain_name(dotted)
        parts.setdefault(name, Part(name or "model", module))
    return parts


def _around(
    parts: Mapping[str, Part], wholes: Sequence[torch.nn.Module], layers: Sequence[Part]
) -> tuple[list[Part], list[Part]]:
    """The parts before the last layer of each whole, and those after it; none is after if it has no layers.

    The parts inside layers are left out, unless a whole is a layer itself.
    """
    inside = {
        id(module)
        for layer in layers
        if all(layer.module is not whole for whole in wholes)
        for module in layer.module.modules()
    }
    before: list[Part] = []
    after: list[Part] = []
    for whole in wholes:
        own = {id(module) for module in whole.modules()}
        every = [part for part in parts.values() if id(part.module) in own]
        places = [place for place, part in enumerate(every) if id(part.module) in inside]
        last = max(places, default=len(every))
        before += [part for part in every[:last] if id(part.module) not in inside]
        after += every[last + 1 :]
    return before, after


def _wholes(model: torch.nn.Module) -> dict[str, Part]:
    """The modules that a training loop calls, by path: the model, or the pipeline stages in a list."""
    path, whole = "", _whole("", model)
    if not isinstance(unwrapped(whole.module), CONTAINERS) or is_called(whole.module):
        return {path: whole}
    stages = [_whole(stage.name, stage.module) for stage in _members(path, whole.module)]
    return {stage.name: stage for stage in stages} or {path: whole}


def _whole(path: str, model: torch.nn.Module) -> Part:
    """The model inside its data-parallel wrappers, whose calls would start communication."""
    inside = unwrapped(model)
    children = dict(inside.named_children())
    if [*children] == ["module"] and not [*inside.parameters(recurse=False)]:
        return _whole(_below(path, "module"), children["module"])
    return Part(path or "model", model)


def _repeated(path: str, whole: torch.nn.Module, vocabulary: int) -> list[Part]:
    """The layers in a whole. In one of several stages only blocks count: the stage may be a layer itself."""
    lists = _without_side_lists([*_lists(path, whole, vocabulary)])
    return [layer for each in lists for layer in each if not path or not is_plain(layer.module)]


def _named_layers(parts: Mapping[str, Part], layers: str | Sequence[str]) -> list[Part]:
    """The layers that a user named, by the path of their list or by their own paths."""
    found: list[Part] = []
    for path in [layers] if isinstance(layers, str) else layers:
        part = _named(parts, "layers", path)
        is_list = isinstance(layers, str) and isinstance(unwrapped(part.module), CONTAINERS)
        found += _members(part.name, part.module) if is_list or not is_called(part.module) else [part]
    if not found:
        raise ValueError(f"layers={layers!r} contains no module with parameters")
    return found


def _named(parts: Mapping[str, Part], setting: str, path: str) -> Part:
    name = plain_name(path)
    if name == "model" and name not in parts:
        return parts[""]
    if not name or name not in parts:
        nearest = ", ".join(map(repr, difflib.get_close_matches(name, filter(None, parts), cutoff=0.0)))
        raise ValueError(f"{setting}={path!r} is not a module of the model; the nearest are {nearest}")
    return parts[name]


def _lists(path: str, module: torch.nn.Module, vocabulary: int) -> Iterator[list[Part]]:
    """The outermost lists of layers in a module. The members of a list are all plain, or none is."""
    if layers := _layers_in(path, module, vocabulary):
        yield layers
        return
    for name, child in module.named_children():
        yield from _lists(_below(path, name), child, vocabulary)


def _layers_in(path: str, container: torch.nn.Module, vocabulary: int) -> list[Part]:
    """The layers in a container; if its members are stages of blocks, the blocks."""
    if not isinstance(unwrapped(container), CONTAINERS):
        return []
    members = _without_ends(_members(path, container), vocabulary)
    # A pipeline stage may have a list of one block.
    is_lone = len(members) == 1 and not is_plain(members[0].module) and not is_called(container)
    if not is_lone and max(_kinds(members).values(), default=0) < 2:
        return []
    opened = [_blocks_of(member, vocabulary) for member in members]
    if 2 * sum(map(_size, opened)) <= _size(members):
        return members
    return [layer for member, blocks in zip(members, opened, strict=True) for layer in blocks or [member]]


def _members(path: str, container: torch.nn.Module) -> list[Part]:
    """The members that have parameters; a member that is not called, such as a list, is expanded."""
    found: list[Part] = []
    for name, member in unwrapped(container)._modules.items():  # named_children() omits shared layers
        if member is None:
            continue
        below = _below(path, name)
        if not is_called(member):
            found += _members(below, member)
        elif any(True for _ in member.parameters()):
            found.append(Part(below, member))
    return found


def _without_ends(members: Sequence[Part], vocabulary: int) -> list[Part]:
    """Without the other modules that a container has before, between and after its blocks."""
    kinds = _kinds(members)
    inner = [
        member
        for member in members
        if not is_table(member.module)
        and (kinds[kind_of(member.module)] > 1 or not _is_end(member.module, vocabulary))
    ]
    return [member for member in inner if not is_plain(member.module)] or inner


def _is_end(module: torch.nn.Module, vocabulary: int) -> bool:
    """Whether it contains an embedding, or a matrix with a row for each token."""
    return any(
        is_table(each) or (is_matrix(each) and rows_of(each) == vocabulary) for each in module.modules()
    )


def _blocks_of(stage: Part, vocabulary: int) -> list[Part]:
    """The blocks that a stage runs one after the other; empty if it is not a stage."""
    if any(name in CALLED_AS_ONE for name, _ in wrapped(stage.module)):
        return []
    inside = unwrapped(stage.module)
    if isinstance(inside, CONTAINERS):
        lists = [_layers_in(stage.name, inside, vocabulary)]
    else:
        lists = [
            _layers_in(_below(stage.name, name), child, vocabulary)
            for name, child in inside.named_children()
            if isinstance(unwrapped(child), CONTAINERS) and not is_routed(inside, child)
        ]
    return [block for each in lists if len(each) > 1 for block in each if not is_plain(block.module)]


def is_routed(owner: torch.nn.Module, child: torch.nn.Module) -> bool:
    """Whether the members of ``child`` are experts: a matrix beside them has a row for each.

    Under expert parallelism the number of rows is a multiple of the number of members; a router has few rows,
    unlike a projection between stages.
    """
    count = sum(1 for _ in unwrapped(child).children())
    own = {id(parameter) for parameter in child.parameters()}
    shapes = [shape_of(parameter) for parameter in owner.parameters() if id(parameter) not in own]
    return count > 0 and any(
        count in shape or (min(shape) % count == 0 and 4 * min(shape) <= max(shape))
        for shape in shapes
        if len(shape) == 2
    )


def _without_side_lists(lists: Sequence[list[Part]]) -> Sequence[list[Part]]:
    """Without heads, stems and projectors: plain modules beside blocks, or a small list at the end."""
    if blocks := [each for each in lists if not is_plain(each[0].module)]:
        return blocks
    sizes = [_size(each) for each in lists]
    largest = max(sizes, default=0)
    return [
        each
        for place, each in enumerate(lists)
        if place <= sizes.index(largest) or 10 * sizes[place] >= largest
    ]


def _outputs(embeddings: Sequence[Part], outside: Sequence[Part], after: Sequence[Part]) -> list[Part]:
    """The matrices tied to an embedding, else those with as many rows as the largest embedding, else the one
    after the layers."""
    tables = [unwrapped(each.module) for each in embeddings]
    matrices = [part for part in outside if is_matrix(part.module)]
    weights = {id(table.weight) for table in tables if rows_of(table)}
    if tied := [each for each in matrices if id(unwrapped(each.module).weight) in weights]:
        return tied
    rows = max(map(rows_of, tables), default=0)
    if fitting := [each for each in matrices if rows_of(each.module) == rows]:
        return fitting
    candidates = [part for part in after if is_matrix(part.module)]
    if len(candidates) > 1:
        names = [each.name for each in candidates]
        raise ValueError(
            f"the model does not show which of {', '.join(names)} is the output layer; "
            f"pass ReplayConfig(output={names[-1]!r}) or another of them"
        )
    return candidates


def _below(path: str, name: str) -> str:
    return plain_name(f"{path}.{name}" if path else name)


def _kinds(members: Sequence[Part]) -> Counter[type]:
    return Counter(kind_of(member.module) for member in members)


def _size(parts: Sequence[Part]) -> int:
    return sum(math.prod(shape_of(each)) for part in parts for each in part.module.parameters())


def experts_of(model: torch.nn.Module, named: str | Sequence[str] | None = None) -> tuple[Part, ...]:
    """Return the modules that compute routed rows, in the order of registration: stacks of experts, or the
    members of a list.

    ``named`` are their paths, in which ``*`` matches anything. Raises ``ValueError`` if a path matches none.
    """
    if named is not None:
        return _named_experts(model, [named] if isinstance(named, str) else named)
    found: list[Part] = []
    inside: set[int] = set()
    for dotted, module in model.named_modules():
        if id(module) in inside:
            continue
        if members := _listed_experts(plain_name(dotted), module):
            found += members
            inside.update(id(each) for part in members for each in part.module.modules())
    return tuple(found)


def without_experts(layers: Sequence[Part], experts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the layers; a layer that contains experts is replaced by those of its parts that do not."""
    apart = {id(module) for part in experts for module in part.module.modules()}
    return tuple(each for layer in layers for each in _dense(layer, apart))


def _named_experts(model: torch.nn.Module, patterns: Sequence[str]) -> tuple[Part, ...]:
    found: dict[str, Part] = {}
    for dotted, module in model.named_modules():
        name = plain_name(dotted)
        if is_called(module) and any(fnmatchcase(name, each) for each in patterns):
            found.setdefault(name, Part(name, module))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"experts={pattern!r} matches no module of the model that is called; "
                "* matches anything, as in 'layers.*.experts'"
            )
    return tuple(found.values())


def _listed_experts(name: str, module: torch.nn.Module) -> list[Part]:
    """The module itself if it is a stack of experts, or the experts in its lists."""
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
    """Whether it consists of matrices for several experts: two or more tensors for the same number."""
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
