"""One check by its parts and by its recipes: exclusive times that add up to all that it takes.

The device is waited for at every change from one part to another, so that nothing overlaps: the sum is more
than what a check adds to a step. What was captured during the step is counted apart, as ``training``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torchscout.c3 import compare as c3
from torchscout.c3 import signature
from torchscout.c3.channel import ProcessGroupChannel
from torchscout.communicators import Communicators, PeerCommunicator
from torchscout.config import ReplayConfig
from torchscout.replay import active, replayer
from torchscout.replay.capture import broadcast
from torchscout.replay.capture.context import RngState
from torchscout.replay.capture.hooks import CallCapture
from torchscout.replay.recipe import Observation
from torchscout.replay.recipes import optimizer, process_groups, replicated_state
from torchscout.replay.recipes.layer import LayerReplay
from torchscout.run.writer import RunWriter
from torchscout.session.replay.driver import ReplayDriver
from torchscout.session.replay.summary import SummaryRecorder
from torchscout.session.replay.time_comparison import TimeComparison
from training_parts.job import Job
from training_parts.ledger import Ledger, Patches

_REPLAYS = {
    LayerReplay: None,  # its kind is that of the recipe
    optimizer.OptimizerReplay: "optimizer",
    replicated_state._StateComparison: "replicated_state",
    process_groups._Transfers: "process_groups",
}


def breakdown(job: Job, checks: int, warm: int = 3) -> dict[str, Any]:
    """Milliseconds a check, by kind and part; all recipes are due at every step."""
    own = dist.new_group(backend="gloo")
    ledger = Ledger(job.synchronize, lambda: dist.barrier(own))
    patches = Patches()
    with _patched(patches, ledger), job.attached(ReplayConfig(interval=1), None):
        job.steps(warm)
        job.synchronize()
        ledger.seconds.clear()
        ledger.calls.clear()
        for _ in range(checks):
            job.step()
            job.synchronize()
    dist.destroy_process_group(own)
    return {
        "checks": checks,
        "ms": {" / ".join(key): 1e3 * each / checks for key, each in ledger.seconds.items()},
        "calls": {" / ".join(key): each / checks for key, each in ledger.calls.items()},
    }


@contextmanager
def _patched(patches: Patches, ledger: Ledger) -> Iterator[None]:
    kinds: dict[int, str] = {}
    """Of replays, by identity."""

    def of_replay(part: str) -> Any:
        return lambda replay, *_, **__: ledger.part(part, kinds.get(id(replay)))

    def of_begun(part: str) -> Any:
        return lambda *args, **__: ledger.part(part, _kind_of(args))

    def keep_kinds(self: Any, *_: Any) -> Any:
        kinds.update({id(each.replay): each.due.kind for each in self._active})
        return ledger.part("check")

    part, exchange = ledger.part, ledger.exchange
    patches.around(ReplayDriver, "step_finished", lambda *_: part("remainder", "check"))
    patches.around(replayer.Replayer, "check", keep_kinds)
    patches.around(replayer.Replayer, "begin", lambda *_: part("arm the next"))
    patches.around(replayer.Replayer, "_describe", lambda *_: part("describe"))
    patches.around(replayer.Replayer, "_align", lambda *_: part("align"))
    patches.around(replayer.Replayer, "_observe", lambda *_: part("observe"))
    patches.around(replayer.Replayer, "_first_round", lambda *_: part("compare"))
    patches.around(replayer, "_description", of_begun("describe"))
    patches.around(replayer.Replayer, "_prepare", of_begun("prepare"))
    patches.around(replayer.Replayer, "_keep", of_begun("keep for a sweep"))
    for kind in _REPLAYS:
        patches.around(kind, "describe", of_replay("describe"))
        patches.around(kind, "prepare", of_replay("prepare"))
        patches.around(kind, "observe", of_replay("observe"))
        patches.around(kind, "align", of_replay("align"))
    patches.around(LayerReplay, "_forward", of_replay("forward"))
    patches.around(LayerReplay, "_backward", of_replay("backward"))
    patches.around(optimizer.OptimizerReplay, "_capture", lambda *_: part("capture", "training"))
    patches.around(CallCapture, "_before", lambda *_: part("capture", "training"))
    patches.around(CallCapture, "_after", lambda *_: part("capture", "training"))
    for name in ("now", "apply"):
        patches.around(RngState, name, lambda *_: part("random states"))
    patches.around(signature.PendingSignatures, "__init__", lambda *_, **__: part("signatures"))
    patches.around_function(signature, "read_signatures", lambda *_, **__: part("transfer signatures"))
    patches.around(replayer, "gather", lambda *_, **__: part("compare"))
    patches.around(replayer, "judged", lambda *_, **__: part("judge"))
    patches.around(Observation, "read", lambda *_: part("read clocks"))
    patches.around_function(broadcast, "captured", lambda *_: part("copy"))
    patches.around(ReplayDriver, "_conclude", lambda *_: part("diagnose"))
    patches.around(SummaryRecorder, "record", lambda *_: part("write records"))
    patches.around(RunWriter, "record", lambda *_: part("write records"))
    patches.around(ReplayDriver, "_certify", lambda *_, **__: part("certify"))
    patches.around(c3, "compare", lambda *_, **__: exchange("gather signatures"))
    patches.around(PeerCommunicator, "broadcast", lambda _, tensor, **__: exchange(_broadcast(tensor)))
    patches.around(ProcessGroupChannel, "gather", lambda *_, **__: exchange("gather descriptions"))
    patches.around(ProcessGroupChannel, "broadcast", lambda *_, **__: exchange("gather descriptions"))
    patches.around(Communicators, "highest", lambda *_, **__: exchange("vote"))
    patches.around(Communicators, "first_problems", lambda *_, **__: exchange("vote"))
    patches.around(TimeComparison, "exchange", lambda *_, **__: exchange("exchange times and votes"))
    try:
        yield
    finally:
        patches.undo()


def _broadcast(tensor: torch.Tensor) -> str:
    return f"broadcast from {'host' if tensor.is_cpu else 'device'} memory"


def _kind_of(arguments: Any) -> str | None:
    for each in arguments:
        if isinstance(each, active.ActiveReplay):
            return each.due.kind
    return None


def by_part(rows: dict[str, float]) -> dict[str, float]:
    """Over all kinds."""
    found: Counter[str] = Counter()
    for key, milliseconds in rows.items():
        kind, _, part = key.partition(" / ")
        found["capture, during the step" if kind == "training" else part] += milliseconds
    return dict(found)


def by_kind(rows: dict[str, float]) -> dict[str, float]:
    """Over all parts."""
    found: Counter[str] = Counter()
    for key, milliseconds in rows.items():
        found[key.partition(" / ")[0]] += milliseconds
    return dict(found)


def device_waits(job: Job, steps: int) -> int:
    """How often this process waits for its device in so many steps."""
    if not job.is_cuda:
        return 0
    import warnings

    waits = Counter[str]()
    patches = Patches()

    @contextmanager
    def counted(*_: Any, **__: Any) -> Iterator[None]:
        waits["explicit"] += 1
        yield

    patches.around(torch.cuda, "synchronize", counted)
    patches.around(torch.cuda.Event, "synchronize", counted)
    patches.around(torch.cuda.Stream, "synchronize", counted)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            job.steps(steps)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        patches.undo()
    return waits["explicit"] + sum("synchroniz" in str(each.message) for each in seen)
