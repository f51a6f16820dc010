"""Marks phases without a change to the training loop: batches that a DataLoader fetches, checkpoints that are
read and written (paper, section 9).

PyTorch has no hooks there, so functions are replaced while a session is attached. A replaced function calls
the original one and returns its result. A program that imported a function by name (``from torch import
save``) before attaching keeps the original, and is not seen.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch

from torchscout.decision.progress import Phase
from torchscout.observer.publisher import Publisher
from torchscout.utils._torch import DataLoaderIterator

__all__ = ["mark_phases", "when_imported"]

_DCP = "torch.distributed.checkpoint"
_CHECKPOINTS = {
    **dict.fromkeys(("torch.save", "torch.serialization.save"), Phase.CHECKPOINT_WRITE),
    **dict.fromkeys(("torch.load", "torch.serialization.load"), Phase.CHECKPOINT_READ),
}
"""PyTorch's functions, under every name by which they are called."""
_DCP_CHECKPOINTS = {
    **dict.fromkeys((f"{_DCP}.save", f"{_DCP}.state_dict_saver.save"), Phase.CHECKPOINT_WRITE),
    **dict.fromkeys((f"{_DCP}.async_save", f"{_DCP}.state_dict_saver.async_save"), Phase.CHECKPOINT_WRITE),
    **dict.fromkeys((f"{_DCP}.load", f"{_DCP}.state_dict_loader.load"), Phase.CHECKPOINT_READ),
}
"""The same of a package that takes a tenth of a second to import, for a job that does so itself."""

Mark = Callable[[], AbstractContextManager[None]]
Undo = Callable[[], None]


def mark_phases(
    publisher: Publisher, functions: Mapping[str, Phase], is_training: Callable[[], bool]
) -> Undo:
    """Mark the phases of PyTorch's functions and of a framework's own ``functions``, given by their full
    names. Returns a function that removes the marks.

    Batches for an evaluation are not marked: ``is_training`` returns whether a batch is for training. Nor is
    a function that this release of the framework does not have.
    """

    def input_mark(*, is_compared: bool) -> AbstractContextManager[None]:
        if is_training() and torch.is_grad_enabled():
            return publisher.marked(Phase.INPUT, is_compared=is_compared)
        return nullcontext()

    with ExitStack() as undo:
        # Starting the workers of a loader takes time once in an epoch, and is no batch.
        undo.callback(_mark(torch.utils.data.DataLoader, "__iter__", partial(input_mark, is_compared=False)))
        if DataLoaderIterator is not None:
            undo.callback(_mark(DataLoaderIterator, "__next__", partial(input_mark, is_compared=True)))

        def mark_all(checkpoints: Mapping[str, Phase]) -> None:
            for path, phase in checkpoints.items():
                for owner, name in _find(path):
                    # Ranks may write different amounts, so their times are not compared.
                    marks.callback(_mark(owner, name, partial(publisher.marked, phase, is_compared=False)))

        marks = undo.enter_context(ExitStack())
        mark_all({**_CHECKPOINTS, **functions})
        undo.callback(when_imported(_DCP, lambda: mark_all(_DCP_CHECKPOINTS)))
        return undo.pop_all().close
    raise AssertionError("nothing above is suppressed")


def _find(path: str) -> Iterator[tuple[Any, str]]:
    owner, _, name = path.rpartition(".")
    try:
        found = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return
    if name in vars(found):  # an inherited method is replaced in the class that has it
        yield found, name


class _Replaced:
    """A function that is replaced while it has marks, under all of its names by one object.

    It is replaced once for all sessions: if each wrapped what it finds, they could not end in any order.
    """

    def __init__(self, original: Any) -> None:
        self.original, self.marks = original, list[Mark]()
        self._places: list[tuple[Any, str]] = []

        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as phases:
                for mark in [*self.marks]:
                    phases.enter_context(mark())
                return original(*args, **kwargs)

        self.replacement = replacement

    def put(self, owner: Any, name: str) -> None:
        if vars(owner)[name] is self.original:
            setattr(owner, name, self.replacement)
            self._places.append((owner, name))

    def restore(self) -> None:
        """Put the original back, unless another library has wrapped the replacement meanwhile: without marks
        it only calls the original."""
        for owner, name in self._places:
            if vars(owner).get(name) is self.replacement:
                setattr(owner, name, self.original)


_replaced: dict[int, _Replaced] = {}
"""By the identities of the original and of its replacement."""


def _mark(owner: Any, name: str, mark: Mark) -> Undo:
    present = vars(owner)[name]
    function = _replaced.get(id(present)) or _Replaced(present)
    keys = id(function.original), id(function.replacement)
    _replaced.update(dict.fromkeys(keys, function))
    function.put(owner, name)
    function.marks.append(mark)

    def remove() -> None:
        function.marks.remove(mark)
        if not function.marks:
            function.restore()
            for key in keys:
                _replaced.pop(key, None)

    return remove


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` now if the module is imported already, and otherwise right after its import. Returns a
    function that ends the wait."""
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """Notices the import of one module, and leaves it to the other finders."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def remove(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != self._name:
            return None
        self.remove()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            self._action()

        loader.exec_module = exec_module
