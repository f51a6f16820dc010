"""``torchrun --rdzv-backend=scout``: torch's dynamic rendezvous, without machines that are known to be bad.

[Note: who joins] Torch's agents meet in rounds. When workers fail, every agent leaves the round; when all
have left, the next round opens, and the first ``max_nodes`` agents that join run the job. These rules are
added:

- An agent publishes the machines that its restart plan excludes before it leaves a round. So all agents know
  them before the next round opens, and the agent of such a machine never joins it: it waits, without workers,
  until the job ends. It does not exit, because it may host the store of the rendezvous. Where workers failed
  before there was a verdict, their observers write the plan later, and the agent publishes it while it waits.
- An agent that was not in the last round, a standby, joins a new one later than those that were: their
  machines have the job's state in memory.
- An agent whose machine needs a preflight runs it before it joins the next round. Meanwhile a standby may
  take its place. If the preflight finds a fault, the machine is quarantined; if it cannot decide, the machine
  joins.
- An agent for which there is no place waits without a time limit. Torch does not park one that was on the
  wait list when the round filled up: it would restart the full job for it again and again, and at last let
  it time out and close the job's rendezvous.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from torchscout.decision.types import Action, Decision
from torchscout.log import log, show_by_default
from torchscout.plugins.quarantine import Quarantine
from torchscout.run.restart import FOLDER_VARIABLE, RestartPlan
from torchscout.utils._torch import RendezvousAction, RendezvousJoin
from torchscout.utils.identity import host_name
from torchscout.utils.text import listed

__all__ = ["ScoutRendezvous", "create_handler"]

_POLL_SECONDS = 1.0
"""As torch's agents do."""
_STANDBY_SECONDS = 3.0
"""How much later a standby joins: the others notice within a second that a round is open."""
_REPORT_SECONDS = 10.0
"""After this time without enough machines, the log says so."""
_PREFLIGHT_SECONDS = 60
_PREFLIGHT_LIMIT = 600.0
"""How much longer a preflight may take to start and to end. It ends itself much earlier."""
_HOST_RANKS = 3
"""Ranks of a preflight on a machine without accelerators: as few as can outvote one."""


def create_handler(parameters: RendezvousParameters) -> ScoutRendezvous:
    """Make the handler of one agent, with the options of torch's ``c10d`` backend and two more.

    ``plan`` is the folder of the restart plan, by default a new one; workers get it in an environment
    variable. ``preflight`` is for how many seconds a preflight repeats its work.
    """
    show_by_default()
    folder = parameters.get("plan") or os.environ.get(FOLDER_VARIABLE)
    if not folder:
        folder = tempfile.mkdtemp(prefix="torchscout-plan-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder = Path(folder).absolute()
    os.environ[FOLDER_VARIABLE] = str(folder)
    backend, store = c10d.create_backend(parameters)
    inner = dynamic.create_handler(store, backend, parameters)
    quarantine = Quarantine(store, parameters.run_id, folder)
    handler = ScoutRendezvous(inner, quarantine, RestartPlan.path(folder), parameters.endpoint)
    handler.preflight_seconds = parameters.get_as_int("preflight", _PREFLIGHT_SECONDS) or _PREFLIGHT_SECONDS
    return handler


_ENDS = (RendezvousClosedError, RendezvousGracefulExitError)
"""What torch raises when a job has ended."""


class _MustNotJoinError(RendezvousError):
    """This machine is quarantined, or needs a preflight first."""


class ScoutRendezvous(RendezvousHandler):
    """Torch's handler, with the rules of [Note: who joins]."""

    def __init__(
        self, inner: dynamic.DynamicRendezvousHandler, quarantine: Quarantine, plan_path: Path, endpoint: str
    ) -> None:
        self._inner, self._quarantine = inner, quarantine
        self._plan_path, self._endpoint = plan_path, endpoint
        self.preflight_seconds = _PREFLIGHT_SECONDS
        self._host = host_name()
        self._preflights = 0
        """How many preflights of this machine have been run."""
        self._round: int | None = None
        """The last round that this agent was in."""
        self._is_outside = False
        """Whether other agents run the job, and this one has no part in it."""
        self._is_standby = False
        """Whether the log says that it waits."""
        self._open_since: float | None = None
        self._waits_since: float | None = None
        inner._op_executor = _Executor(inner._op_executor, self._next_action)  # type: ignore[assignment]

    def get_backend(self) -> str:
        return "scout"

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def is_closed(self) -> bool:
        with self._explained():
            return self._inner.is_closed()

    def num_nodes_waiting(self) -> int:
        """How many agents could join if the workers were restarted."""
        with self._explained():
            waiting = self._inner.num_nodes_waiting()
        is_full = len(self._state.participants) >= self._inner.settings.max_nodes
        return 0 if is_full else waiting

    def shutdown(self) -> bool:
        """Close the rendezvous, unless others use it: then the job goes on without this agent."""
        if not self._is_outside:
            return self._inner.shutdown()
        self._inner._stop_heartbeats()
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round. The agent of a quarantined machine, or one too many, waits here."""
        with self._explained():
            self._share(self._quarantine.plan())
            while True:
                self._open_since, self._waits_since = None, time.monotonic()
                try:
                    info = self._inner.next_rendezvous()
                except _MustNotJoinError:
                    if (decision := self._due_preflight()) is None:
                        self._wait_for_end()
                    else:
                        self._run_preflight(decision)
                    continue
                self._round, self._is_outside, self._is_standby = self._state.round, False, False
                return info

    def _share(self, plan: RestartPlan) -> None:
        if plan.is_stopped:
            self._inner.set_closed()
            raise RendezvousClosedError(
                f"An earlier run decided: {plan.sentence} To start the job again, correct the cause and "
                f"remove the restart plan on every machine: {self._plan_path}."
            )
        if self._quarantine.publish(plan.reasons()) and self._round is None:
            # In the first round, agents that do not have the plan may have joined before: they leave now.
            time.sleep(2 * _POLL_SECONDS)

    def _due_preflight(self) -> Decision | None:
        """Return the decision that asks for a preflight of this machine, until it has run."""
        restarts = self._quarantine.known.restarts
        asked = [each for each in restarts if each.action is Action.PREFLIGHT and self._host in each.hosts]
        is_due = len(asked) > self._preflights and asked[-1] is restarts[-1]
        return asked[-1] if is_due and self._host not in self._quarantine.hosts() else None

    def _run_preflight(self, decision: Decision) -> None:
        """Check the devices of this machine; quarantine it if one of them is at fault."""
        log.warning("this machine, %s, runs a preflight before it joins. %s", self._host, decision.sentence)
        self._preflights += 1
        run_dir = self._plan_path.parent / f"preflight-{self._host}-{self._preflights}"
        status, found = preflight(self.preflight_seconds, run_dir)
        if status == 0:
            log.info("the preflight of this machine, %s, found nothing", self._host)
        elif status == 1:
            self._quarantine.publish({self._host: f"Its preflight failed: {found}"})
        else:
            log.warning("the preflight of this machine, %s, decided nothing: %s", self._host, found)

    def _wait_for_end(self) -> None:
        """Wait while this machine is quarantined; raises ``RendezvousClosedError`` at the job's end."""
        log.warning(
            "this machine, %s, is quarantined and runs no workers. %s This agent waits until the job ends. "
            "To use the machine again, repair it, remove its name from the job's %s, and restart the job.",
            self._host,
            self._quarantine.hosts().get(self._host, ""),
            self._plan_path.name,
        )
        while self._host in self._quarantine.hosts():
            if self._inner.is_closed():
                raise RendezvousClosedError
            time.sleep(_POLL_SECONDS)

    def _next_action(self, operation: Callable[[Any, float], Any], context: Any, deadline: float) -> Any:
        """What to do to join a round, given its state."""
        state, node = context.state, context.node
        self._quarantine.publish_new()
        quarantined = self._quarantine.hosts()
        is_participant = node in state.participants
        is_full = len(state.participants) >= context.settings.max_nodes
        must_not_join = self._host in quarantined or self._due_preflight() is not None
        if must_not_join and not (is_participant and state.complete):
            self._is_outside = True
            return _leaving(state, node)
        must_wait = not (is_participant or state.complete) and self._must_let_others_join(state.round)
        self._is_outside = must_wait or (state.complete and not is_participant)
        if is_participant or state.complete:
            self._open_since = None
        if must_wait and not state.closed:
            return RendezvousAction.SYNC
        if self._is_outside and is_full:
            if not self._is_standby:
                log.info("this machine, %s, is a standby: the job has all machines that it needs", self._host)
            self._is_standby = True
            if node in state.wait_list:
                return RendezvousAction.REMOVE_FROM_WAIT_LIST
        if is_participant and not state.complete:
            self._report(state, context.settings, deadline, quarantined)
        return operation(context, deadline)

    def _must_let_others_join(self, number: int) -> bool:
        """Whether this agent is a standby, and the round has just been opened."""
        self._open_since = self._open_since or time.monotonic()
        is_standby = number > 0 and self._round != number - 1
        return is_standby and time.monotonic() < self._open_since + _STANDBY_SECONDS

    def _report(self, state: Any, settings: Any, deadline: float, quarantined: Mapping[str, str]) -> None:
        """Log once that machines are missing."""
        now, joined, needed = time.monotonic(), len(state.participants), settings.min_nodes
        if self._waits_since is None or now < self._waits_since + _REPORT_SECONDS or joined >= needed:
            return
        self._waits_since = None
        log.warning(
            "%d of %d machines have joined the job%s. Start torchrun on another machine within %.0f s, or "
            "the job ends.",
            joined,
            needed,
            f", and {listed(quarantined)} must not" if quarantined else "",
            max(0.0, deadline - now),
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Log what torch's errors mean for the job. An agent that has no part in the job ends with it."""
        try:
            yield
        except (*_ENDS, RendezvousConnectionError) as error:
            if self._is_outside:
                log.info("the job has ended without this machine, %s", self._host)
                # Not RendezvousGracefulExitError, on which PyTorch 2.13 fails.
                raise SystemExit(0) from error
            if isinstance(error, _ENDS):
                raise
            log.error(
                "the store of the rendezvous, %s, cannot be reached: the agent that hosts it has ended, or "
                "its machine is gone. The job ends; its checkpoints and its restart plan remain. Start it "
                "again with --rdzv-endpoint on another machine.",
                self._endpoint,
            )
            raise
        except RendezvousTimeoutError:
            joined, needed = len(self._state.participants), self._inner.settings.min_nodes
            log.error("the job ends: too few machines joined in time, %d of %d", joined, needed)
            raise

    @property
    def _state(self) -> Any:
        return self._inner._state_holder.state


def _leaving(state: Any, node: Any) -> Any:
    """How an agent that must not join gives up its place in an open round; raises when it has none."""
    if node in state.participants:
        return RendezvousAction.REMOVE_FROM_PARTICIPANTS
    if node in state.wait_list:
        return RendezvousAction.REMOVE_FROM_WAIT_LIST
    if node in state.redundancy_list:
        return RendezvousAction.REMOVE_FROM_REDUNDANCY_LIST
    raise _MustNotJoinError


def preflight(seconds: float, run_dir: Path) -> tuple[int, str]:
    """Run ``scout preflight`` on the devices of this machine; return its exit status and what it found."""
    ranks = torch.cuda.device_count() or _HOST_RANKS
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", "torchscout", "preflight", f"--seconds={seconds}", "--json"]
    command += [f"--run-dir={run_dir}", "--"]
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    with subprocess.Popen(
        [*command, *launcher], stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds + _PREFLIGHT_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 2, "it did not end"
    try:
        report = json.loads(output)
    except ValueError:
        return 2, f"it ended with status {process.returncode} and without a report"
    sentences = [*(each["sentence"] for each in report["incidents"]), *report["reasons"]]
    return process.returncode, " ".join(sentences)


class _Executor:
    """Runs torch's operations on the state of the rendezvous, with another rule for joining."""

    def __init__(self, inner: Any, next_action: Callable[..., Any]) -> None:
        self._inner, self._next_action = inner, next_action

    def run(self, operation: Callable[..., Any], deadline: float, *more: Any) -> None:
        if isinstance(operation, RendezvousJoin):
            operation = partial(self._next_action, operation)
        self._inner.run(operation, deadline, *more)
