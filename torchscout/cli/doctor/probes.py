"""Gathers facts about a machine by trying what a job will do. The checks turn them into findings."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torchscout.adapters.versions import TESTED
from torchscout.checkpoint.folder import owner_of
from torchscout.cli.doctor.facts import Clock, Folder, Installed, Limits, Stacks, TorchFacts
from torchscout.decision.repeatability import NONDETERMINISTIC
from torchscout.decision.types import EvidenceRecord
from torchscout.errors import CheckpointError
from torchscout.observer import stacks
from torchscout.run.reader import Stamped, read
from torchscout.utils.private_files import NoLocksError, is_private, try_lock
from torchscout.utils.procfs import is_in_memory

__all__ = [
    "FRAMEWORKS",
    "ask_torch",
    "clock",
    "folder_at",
    "installed",
    "limits",
    "not_repeating",
    "own_stacks",
    "own_versions",
]

FRAMEWORKS = tuple(TESTED)
_NEEDED = ("torchscout", "torch", "numpy", "xxhash", "pyzmq", "triton")


def installed() -> Installed:
    try:
        import zmq
    except ImportError:
        curve = False
    else:
        curve = bool(zmq.has("curve"))
    return Installed(own_versions(), curve)


def own_versions() -> dict[str, str | None]:
    """The versions that should be the same on all machines."""
    packages = {name: _version(name) for name in (*_NEEDED, *FRAMEWORKS)}
    return {"Python": platform.python_version(), **packages}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def not_repeating(run_dir: Path) -> dict[str, str] | None:
    """The surfaces of a run that are nondeterministic, with the latest reason; None without records."""
    files = sorted((run_dir / "records").glob("rank-*.jsonl"))
    found: dict[str, str] = {}
    for path in files:
        for line in read(path):
            item = line.item if isinstance(line, Stamped) else None
            if isinstance(item, EvidenceRecord) and (item.reason or "").startswith(NONDETERMINISTIC):
                found[item.surface] = str(item.reason)
    return found if files else None


_TEXT = b"written by scout doctor\n"


def folder_at(path: Path) -> Folder:
    """Facts about a folder, or about where it would be created. Leaves nothing behind."""
    path = path.absolute()
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not existing.is_dir():
        return Folder(path, existing == path, f"{existing} is not a folder")
    space = os.statvfs(existing)
    problem, alone, locks = _written(existing)
    if existing == path:
        alone = is_private(os.lstat(path), stat.S_ISDIR)
    return Folder(
        path,
        existing == path,
        problem,
        alone,
        is_in_memory(existing),
        locks,
        _holder(path) if existing == path else None,
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
    )


def _written(folder: Path) -> tuple[str | None, bool | None, bool | None]:
    """Write, move and read a file like a checkpoint: what failed, is it private, and do locks work?"""
    try:
        with tempfile.TemporaryDirectory(prefix=".torchscout-doctor-", dir=folder) as name:
            made = Path(name)
            with (made / "writing").open("wb") as file:
                file.write(_TEXT)
                file.flush()
                os.fsync(file.fileno())
                locks = _locks(file.fileno())
            (made / "writing").replace(made / "written")
            is_intact = (made / "written").read_bytes() == _TEXT
            problem = None if is_intact else "a file that was written has other contents when it is read"
            return problem, is_private(os.lstat(made), stat.S_ISDIR), locks
    except OSError as error:
        return f"{folder}: {error.strerror}", None, None


def _locks(file: int) -> bool:
    try:
        return try_lock(file, fcntl.LOCK_EX)
    except NoLocksError:
        return False


def _holder(folder: Path) -> str | None:
    try:
        owner = owner_of(folder)
    except CheckpointError:
        return None
    return None if owner is None else str(owner)


_STACK_SECONDS = 2.0
_SLEEP_SECONDS = 0.02


def own_stacks(number: int) -> Stacks:
    """Request this process's stacks as an observer does. Must be called in the main thread."""
    with tempfile.TemporaryDirectory(prefix="torchscout-doctor-") as name:
        try:
            registration = stacks.register(Path(name), number)
        except (OSError, ValueError) as error:
            return Stacks(number, str(error))
        try:
            text = stacks.take(os.getpid(), registration.path, number, _STACK_SECONDS)
        finally:
            registration.unregister()
    return Stacks(number, None if "own_stacks" in text else "the signal was sent, but no stack was written")


def clock() -> Clock:
    info = time.get_clock_info("monotonic")
    before = time.monotonic()
    time.sleep(_SLEEP_SECONDS)
    return Clock(info.monotonic, info.resolution, time.monotonic() - before, _SLEEP_SECONDS)


def limits() -> Limits:
    return Limits(_hard(resource.RLIMIT_NOFILE), _hard(resource.RLIMIT_FSIZE))


def _hard(kind: int) -> int | None:
    _, most = resource.getrlimit(kind)
    return None if most == resource.RLIM_INFINITY else most


_TIMEOUT_SECONDS = 300.0

_ABOUT_ITSELF = """
import importlib.util, json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "built_for": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "has_triton": importlib.util.find_spec("triton") is not None,
}))
"""
_FUSED = """
import json, torch
from torchscout.c3.signature import signature
tensor = torch.arange(1 << 16, dtype=torch.float32)
print(json.dumps(signature(tensor.cuda()) == signature(tensor, algorithm="fold")))
"""
_ATTENTION = """
import json, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
q, k, v, g = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
def result(backend):
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    found = (out.detach(), *torch.autograd.grad(out, given, g))
    return b"".join(each.contiguous().view(torch.int16).cpu().numpy().tobytes() for each in found)
counts = {}
for name, backend in backends.items():
    try:
        counts[name] = len({result(backend) for _ in range(16)})
    except RuntimeError:
        counts[name] = 0
print(json.dumps(counts))
"""


def ask_torch() -> TorchFacts:
    """Facts about torch and its devices, from other processes: a broken torch may end its process."""
    about, problem = _answer(_ABOUT_ITSELF)
    if problem is not None:
        return TorchFacts(problem=problem)
    facts = TorchFacts(**{**about, "devices": tuple(about["devices"])})
    if not facts.devices:
        return facts
    attention, _ = _answer(_ATTENTION)
    facts = replace(facts, attention=attention)
    if not facts.has_triton:
        return facts
    fused, problem = _answer(_FUSED)
    return replace(facts, fused=bool(fused), fused_problem=problem)


def _answer(code: str) -> tuple[Any, str | None]:
    """The last line that a process with this code prints, as JSON; or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_SECONDS:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"a process that tries it exits with status {done.returncode}: {last}"
    return json.loads(done.stdout.splitlines()[-1]), None
