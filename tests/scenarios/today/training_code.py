"""Runs the programs of ``test_training_code`` without and with today's torchscout, and compares."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tests.scenarios.rows import Finding
from tests.scenarios.today.thread_ranks import UNTIMED
from tests.support.ranks import LiveRanks, RankError, are_fit
from torchscout import ObserverConfig, Parallelism, RecoveryConfig, ReplayConfig, enable_resiliency
from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.decision.types import Action, Incident
from torchscout.run.reader import IncidentLog
from torchscout.session.session import Session
from torchscout.testing.local_ranks import preload

if TYPE_CHECKING:
    from tests.scenarios.test_training_code import Program

preload("tests.scenarios.sensitive_programs", "tests.scenarios.today.training_code")
ROOT = Path(__file__).parents[3]
LAYOUTS = {
    "one replica": Parallelism(),
    "replicas": Parallelism(replica=2),
    "stages": Parallelism(pipeline=2),
    "two replicas of two slices": Parallelism(replica=2, tensor=2),
}
ACTIONS = {
    Action.CONTINUE: "continue",
    Action.RESTART: "restart",
    Action.INSPECT: "inspect",
    Action.PREFLIGHT: "preflight",
    Action.REPLACE: "replace",
    Action.STOP: "stop",
}
SLOW_START_SECONDS = 120.0
"""What a program may take until torchscout is attached, and where it waits for nothing."""
GROWTH = 10_000
"""Bytes per step that are noticed. What a check remembers for its statistics is less than a tenth of that."""


@dataclass
class Report:
    """What one rank has seen of a program, without and with torchscout."""

    ends: str = "finished"
    bits: list[str] = field(default_factory=list)
    is_same: bool = False
    checks: str = ""
    costs: list[str] = field(default_factory=list)
    is_reusable: bool = True
    """Whether the rank still is in the job in which it was started."""


class Jobs:
    """Starts ranks, and uses them for one program after the other as long as each one finishes."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], LiveRanks] = {}

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def outcome(self, program: Program) -> tuple[str, str, tuple[Finding, ...], str, str]:
        """Return the fields of an ``Outcome``."""
        if isinstance(program.runs, str):
            return _of_script(program.runs)
        with tempfile.TemporaryDirectory(prefix="scout-code-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                reports, ends = self._reports(program, folder)
            except BaseException:
                self._close()
                raise
            finally:
                _end_stopped(folder)
            findings = tuple(map(finding_of, IncidentLog.read(folder / "run").incidents))
        if ends != "finished" or not all(each.is_reusable for each in reports):
            self._close()
        if ends != "finished":
            return ends, "cut short", findings, "", ""
        is_same = all(each.is_same for each in reports)
        (checks,) = {each.checks for each in reports}
        (costs,) = {"; ".join(each.costs) for each in reports}
        return ends, "the same bits" if is_same else "other bits", findings, checks, costs

    def _reports(self, program: Program, folder: Path) -> tuple[Sequence[Report], str]:
        ranks = self._started(program)
        ranks.send((program, folder, _free_port()))
        deadline = time.monotonic() + SLOW_START_SECONDS
        begun = [folder / f"begun-{rank}" for rank in range(program.ranks)]
        while not (ranks.have_answered(0.05) or all(each.exists() for each in begun)):
            assert time.monotonic() < deadline, "training has not begun"
        try:
            reports = ranks.answers(program.limit or SLOW_START_SECONDS)
        except RankError as error:
            return [], _end_of(program, error)
        return reports, next((each.ends for each in reports if each.ends != "finished"), "finished")

    def _started(self, program: Program) -> LiveRanks:
        key = program.ranks, "nccl" if program.on_gpu else "gloo"
        if key in self._ranks and not are_fit(self._ranks[key]):
            self._ranks.pop(key).close()
        if key not in self._ranks:
            self._ranks[key] = LiveRanks(answering, key[0], backend=key[1])
        return self._ranks[key]

    def _close(self) -> None:
        while self._ranks:
            self._ranks.popitem()[1].close()


def _of_script(name: str) -> tuple[str, str, tuple[Finding, ...], str, str]:
    """Run a script of one rank by itself and by `scout run`, at the same time."""
    with tempfile.TemporaryDirectory(prefix="scout-code-") as folder:
        alone, watched = Path(folder) / "alone", Path(folder) / "watched"
        scout = ["-m", "torchscout", "run", "--run-dir", str(watched / "run"), "--", sys.executable]
        started = [_start_script(name, alone), _start_script(name, watched, *scout)]
        errors = [each.communicate(timeout=SLOW_START_SECONDS)[1] for each in started]
        assert started[0].returncode == 0, errors[0]
        assert "attached to" in errors[1]
        raised = re.findall(r"(\w+Error): ", errors[1]) if started[1].returncode else []
        ends = f"raises {raised[-1]} in training" if raised else "finished"
        assert raised or started[1].returncode == 0, errors[1]
        trained = [(each / "rank-0").read_text() for each in (alone, watched)]
        findings = tuple(map(finding_of, IncidentLog.read(watched / "run").incidents))
    if ends != "finished":
        return ends, "cut short", findings, "", ""
    return ends, "the same bits" if trained[0] == trained[1] else "other bits", findings, "", ""


def _start_script(name: str, folder: Path, *before: str) -> subprocess.Popen[str]:
    folder.mkdir()
    place = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
    }
    settings = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, *before, str(ROOT / "tests" / "launch_scripts" / f"{name}.py"), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **{key: str(value) for key, value in (place | settings).items()}},
    )


def _end_of(program: Program, error: RankError) -> str:
    """What became of a job that has not answered. A rank that is gone is the reason that others wait."""
    for failure in error.failures.values():
        if found := re.search(r"exit code (-?\d+)", failure):
            code = int(found[1])
            number = code - 128 if code > 128 else -code
            if number > 0:
                return f"ended by {signal.Signals(number).name}"
    if program.limit is None or not all("did not answer in time" in each for each in error.failures.values()):
        raise error  # of the test
    return f"waits more than {program.limit:g} s"


def finding_of(incident: Incident) -> Finding:
    scope = incident.scope.value.replace("_", " ")
    return Finding(incident.manifestation.value, tuple(incident.ranks), scope, ACTIONS[incident.action])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _end_stopped(folder: Path) -> None:
    """A process that is stopped does not see that its rank is gone."""
    for each in folder.glob("stopped-*"):
        with suppress(ProcessLookupError):
            os.kill(int(each.read_text()), signal.SIGKILL)


def answering(rank: int, requests: Iterator[tuple[Program, Path, int]]) -> Iterator[Report]:
    warnings.filterwarnings("ignore")
    logging.getLogger("torchscout").setLevel(logging.CRITICAL)
    world = dist.group.WORLD
    for program, folder, port in requests:
        alone = Run(rank, program, folder / "alone", port)
        program.runs(alone)
        alone.leave()
        assert alone.report.costs == [], "it costs that without torchscout, too"
        report = _attached(Run(rank, program, folder, port, run_dir=folder / "run"), alone)
        report.is_reusable = dist.is_initialized() and dist.group.WORLD is world
        yield report


def _attached(run: Run, alone: Run) -> Report:
    try:
        run.program.runs(run)
        assert not run._is_failing
        run.meet()  # an incident that another rank had to write is written
    except Exception as error:  # noqa: BLE001  what reaches the program is the answer
        run.report.ends = f"raises {type(error).__name__} {run.where}"
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    run.leave()
    run.report.is_same = run.report.bits == alone.report.bits
    return run.report


class Run:
    """One run of a program on one rank: implements the program's ``Job``."""

    def __init__(
        self, rank: int, program: Program, folder: Path, port: int, run_dir: Path | None = None
    ) -> None:
        """Without a run directory torchscout is not attached."""
        self.rank, self.world, self.port, self.program = rank, program.ranks, port, program
        self.report, self.where = Report(), "before it attaches"
        self._folder, self._run_dir = folder, run_dir
        self._session: Session | None = None
        self._state: Callable[[], Any] = tuple
        self._kept: list[Any] = []
        self._meetings, self._is_failing = 0, False
        self._ahead: list[bool] = []
        torch.manual_seed(0)
        folder.mkdir(exist_ok=True)

    def attach(
        self,
        model: nn.Module | None,
        optimizer: Any = None,
        layout: str | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        optimizers = optimizer if isinstance(optimizer, list) else [each for each in [optimizer] if each]
        if model is not None:
            states = [*optimizers, *([] if finish is not None else [model])]  # which is behind until then
            self._state = lambda: [each.state_dict() for each in states]
        if self._run_dir is None:
            return
        self.where = "when it attaches"
        if finish is not None:
            _install_adapter(self, finish, self._folder)
        self._session = enable_resiliency(
            model,
            optimizer,
            replay=None if model is None else self._replay(),
            observer=self._observer(),
            parallelism=None if layout is None else LAYOUTS[layout],
            run_dir=self._run_dir,
            recovery=RecoveryConfig(act=tuple(self.program.act)),
        )
        self.where = "in training"
        (self._folder / f"begun-{self.rank}").touch()

    def _replay(self) -> ReplayConfig:
        program = self.program
        owned = program.looks_at_state_every
        settings = {} if owned is None else {"recipes": {"replicated_state": owned}}
        return ReplayConfig(
            interval=program.every,
            timeout_seconds=program.waits_seconds,
            max_overhead=program.most_overhead,
            **settings,
            **UNTIMED,  # slow ranks are not the subject, and this machine may be busy
        )

    def _observer(self) -> ObserverConfig | None:
        if not self.program.finds_hangs:
            return None
        return ObserverConfig(min_silence_seconds=2.0, address="127.0.0.1")

    def steps(self, count: int = 6) -> Iterator[int]:
        grown: list[int] = []
        for step in range(1, count + 1):
            yield step
            digest = hashlib.blake2b(digest_size=16)
            _add(digest, [self._state(), self._kept])
            self._kept.clear()
            self.report.bits.append(digest.hexdigest())
            # The first steps allocate what stays.
            if self.program.measures_memory and step in (count // 2, count):
                grown.append(_memory())
        tracemalloc.stop()
        if grown and grown[-1] - grown[0] > count // 2 * GROWTH:
            self.report.costs.append("memory in every step")
        if self._ahead and not any(self._ahead[1:]):
            self.report.costs.append("a wait for the device in every step")

    def keep(self, value: Any) -> None:
        self._kept.append(value)

    def is_ahead(self, is_ahead: bool) -> None:
        self._ahead.append(is_ahead)

    def leave(self) -> None:
        self._state = tuple
        session, self._session = self._session, None
        if session is not None:
            self.report.checks = _checks(session)
            session.close()

    def meet(self) -> None:
        self._meetings += 1
        for rank in [self.rank, *range(self.world)]:
            path = self._folder / f"met-{self._meetings}-{rank}"
            if rank == self.rank:
                path.touch()
            while not path.exists():
                time.sleep(0.005)

    def fail_once(self) -> None:
        self._is_failing = True

    def stop_observer(self) -> None:
        if self._session is None:
            return
        (observer,) = before = _children()
        os.kill(observer, signal.SIGKILL)
        while not (started := _children() - before):
            time.sleep(0.001)
        (observer,) = started
        (self._folder / f"stopped-{self.rank}").write_text(str(observer))
        os.kill(observer, signal.SIGSTOP)

    def change_observer(self) -> None:
        if self._session is not None:
            self._session.change_observer(min_silence_seconds=4.0)


def _checks(session: Session) -> str:
    """What is checked, and whether that is what is said."""
    replay = session.status()["replay"]
    if "off" in replay:
        return "none"
    covered, missing = replay["covered"], [*replay["not_checked"], *replay["covered"]["missing"]]
    is_all = covered["compared"] + covered["watched"] == 1.0 and not missing
    if not replay["checks"]:
        is_said = covered["compared"] == 1.0
        return "none, although all parameters are said to be" if is_said else "none"
    if "xperts" in (replay["lacking"] or ""):
        return "all but its experts" if is_all else "some"
    return "all" if is_all and replay["checks"] == session.step else "some"


def _memory() -> int:
    """Python's memory; what has been allocated so far is not counted."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _children() -> set[int]:
    found = (each.read_text().split() for each in Path("/proc/self/task").glob("*/children"))
    return {int(each) for of_thread in found for each in of_thread}


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(digest, each)
    else:
        digest.update(repr(value).encode())


_of_framework: list[tuple[Run, Callable[[], None]]] = []
"""The run of a program that is a framework of its own, and what ends its update."""


def _install_adapter(run: Run, finish: Callable[[], None], folder: Path) -> None:
    """Make a package with an adapter, as docs/frameworks/own.md says."""
    _of_framework[:] = [(run, finish)]
    package = folder / f"site-{run.rank}" / "late-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[torchscout.adapters]\n"
        "tests.scenarios.training_programs = tests.scenarios.today.training_code:adapter_of\n"
    )
    sys.path.append(str(package.parent))


def adapter_of(model: Any, optimizer: Any, parallelism: Any) -> PyTorchAdapter:
    run, finish = _of_framework[0]

    class Late(PyTorchAdapter):
        def finish_update(self) -> None:
            finish()

        def working_copies(self) -> Any:
            if run._is_failing:
                run._is_failing = False
                raise LookupError("an adapter fails")
            return super().working_copies()

    sys.path.pop()  # for the next program
    return Late(model, [optimizer], parallelism)
