"""The conditions of a replayed call: autocast as in training, deterministic kernels (paper, 6.1.1).

[Note: strict deterministic algorithms] With ``warn_only=True`` every fused attention backward stays
nondeterministic, so that healthy ranks differ. Hence replay asks for ``warn_only=False``, under which an
operator without a deterministic version raises. A pass that raises so is replayed again with
``warn_only=True``, which still picks deterministic versions where there are any, and what it computes is
marked as not repeatable. The replay is made again by all ranks together, after a vote, since a layer may
communicate; see ``replayer``. cuBLAS without ``CUBLAS_WORKSPACE_CONFIG`` raises too on some versions, for
every matrix product. Products on one stream do repeat, so that nothing is marked then: what does not repeat
all the same is found by comparing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Determinism", "autocast_as", "autocast_now", "deterministic"]

_RAISED = "use_deterministic_algorithms"
"""In the message of every operator that refuses to run."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""In the message of those that repeat on one stream, as replay runs them."""
_NO_ATTENTION = "No available kernel"
"""The message of attention whose user allows one backend only, if strict mode refuses that one: so cuDNN's,
whose forward pass repeats and whose backward pass does not."""
_PASSES = ("forward", "backward")


def autocast_now(device: torch.device) -> dict[str, str | None]:
    """For the CPU and the accelerator: the dtype that autocast uses, None where it is off."""
    return {
        kind: _name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in dict.fromkeys(("cpu", device.type))
    }


@contextmanager
def autocast_as(dtypes: Mapping[str, str | None]) -> Iterator[None]:
    with ExitStack() as contexts:
        for kind, dtype in dtypes.items():
            # Without its cache: a weight cast before the update would be used after it.
            chosen = None if dtype is None else getattr(torch, dtype)
            autocast = torch.autocast(kind, dtype=chosen, enabled=dtype is not None, cache_enabled=False)
            contexts.enter_context(autocast)
        yield


@dataclass(slots=True)
class Determinism:
    """Which passes of a module cannot run under strict deterministic algorithms, learned when they raise."""

    relaxed: set[str] = field(default_factory=set)
    """Passes that only warn, from the next replay on."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Passes whose results are not repeatable, each with what the operator said."""

    def learn(self, passed: str, error: RuntimeError) -> bool:
        """Whether the pass has failed for want of a deterministic operator, and can be replayed without."""
        message = str(error)
        if passed in self.relaxed:
            return False
        if _NO_ATTENTION in message:
            self.relaxed.update(_PASSES)
            self.lacking["backward"] = (
                "attention of the only backend that is allowed has no deterministic version"
            )
            return True
        if _RAISED not in message:
            return False
        self.relaxed.add(passed)
        if _CUBLAS not in message:
            self.lacking[passed] = message.partition(",")[0].strip()
        return True


@contextmanager
def deterministic(*, strict: bool = True) -> Iterator[None]:
    """Let kernels repeat themselves; every switch is put back. See [Note: strict deterministic algorithms].

    Not around compiled code: the mode is one of its guards, and other kernels would be compiled.
    """
    # Not torch.use_deterministic_algorithms: it imports the compiler, and sets the compiler's switch too.
    switch: Any = torch._C._set_deterministic_algorithms
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        with warnings.catch_warnings():
            # Of kernels that have no deterministic version: what they compute is marked, or found out about.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            switch(True, warn_only=not strict)
            memory.fill_uninitialized_memory = False
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        switch(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
