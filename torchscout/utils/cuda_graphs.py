"""CUDA graphs of the user: when one is captured, and when one is replayed.

What runs while a stream is captured becomes part of the user's graph, and hooks do not run while a graph is
replayed. See also [Note: captures in other threads].
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["before_replays", "has_compiled_graphs", "ignore_other_threads", "is_capturing"]

_THREAD_LOCAL = 1


def is_capturing() -> bool:
    """Whether the current stream is being captured. SCOUT must not use the device then."""
    return _is_in_use() and torch.cuda.is_current_stream_capturing()


def ignore_other_threads() -> None:
    """Let the calling thread use the driver while another thread captures a graph.

    [Note: captures in other threads] By default a capture forbids many calls of the driver in every thread of
    the process: one of them would invalidate the user's graph, as PyTorch's own watchdog did
    (pytorch/pytorch#148594). A thread in thread-local mode is not concerned. Does nothing before CUDA is in
    use; raises ``OSError`` if CUDA is not NVIDIA's, and ``RuntimeError`` if the driver refuses.
    """
    if not _is_in_use():
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise RuntimeError(f"the CUDA driver reports error {status}")


def has_compiled_graphs(device: torch.device) -> bool:
    """Whether compiled code runs as graphs on this device, as in the mode ``reduce-overhead``: its results
    are overwritten by the next run, and must not be kept alive."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda" or not hasattr(trees, "get_manager"):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return trees.get_manager(index, create_if_none_exists=False) is not None


def _is_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def before_replays(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` before every replay of a graph; returns a function that ends that."""
    graphs: Any = torch.cuda.CUDAGraph
    original = graphs.replay

    @wraps(original)
    def replay(self: Any) -> Any:
        callback()
        return original(self)

    def undo() -> None:
        if graphs.replay is replay:
            graphs.replay = original

    graphs.replay = replay
    return undo
