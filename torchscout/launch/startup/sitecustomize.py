"""Imported by Python at the start of every process under `scout run`. Waits for torch.distributed.

A process that does not import torch.distributed pays for one comparison per import. Nothing of torchscout is
imported before ``init_process_group`` has returned, and nothing here raises. A ``sitecustomize`` module that
this one hides runs as usual.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

__all__ = ["Finder"]

_AWAITED = "torch.distributed.distributed_c10d"
_SETTINGS, _WORKER = "TORCHSCOUT_SETTINGS", "TORCHSCOUT_WORKER"
_calls: list[str] = []
"""What was called of ``torchscout.launch.attachment``."""


class Finder:
    """Notices the import of ``torch.distributed``, and leaves it to the other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AWAITED:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            _run_afterwards(spec.loader)
        return spec


def _run_afterwards(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        execute(module)
        _replace(module, "init_process_group", after="joined")
        _replace(module, "destroy_process_group", before="leaving")

    loader.exec_module = exec_module


def _replace(module: Any, name: str, *, before: str | None = None, after: str | None = None) -> None:
    """Replace a function by one that also calls functions of ``torchscout.launch.attachment``."""
    original = getattr(module, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            _call(before, *args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            _call(after)
        return result

    setattr(module, name, replacement)


def _call(name: str, *args: Any, **kwargs: Any) -> None:
    _calls.append(name)
    try:
        from torchscout.launch import attachment

        getattr(attachment, name)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  the script must run as if this were not there
        if len(_calls) == 1 and os.environ.get("LOCAL_RANK", "0") == "0":
            advice = f"; install torchscout for {sys.executable}" * isinstance(error, ImportError)
            reason = f"{type(error).__name__}: {error}{advice}"
            print(
                f"torchscout: scout run attached nothing, and the script runs without: {reason}",
                file=sys.stderr,
            )


def _explain_at_exit() -> None:
    """Let the script's process on rank 0, and none of its children, say why nothing was attached."""
    if os.environ.get("RANK") == "0" and _WORKER not in os.environ:
        os.environ[_WORKER] = str(os.getpid())
        atexit.register(_explain)


def _explain() -> None:
    if os.environ.get(_WORKER) == str(os.getpid()) and not _calls:
        reason = "the script did not call torch.distributed.init_process_group()"
        print(f"torchscout: scout run attached nothing: {reason}", file=sys.stderr)


def _run_hidden() -> None:
    """Run the ``sitecustomize`` of the environment, if it has one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  no further import
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _here]  # noqa: PTH100
    if _SETTINGS in os.environ:
        sys.meta_path.insert(0, Finder())
        _explain_at_exit()
    _run_hidden()
