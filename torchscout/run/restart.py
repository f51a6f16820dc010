"""What outlives the workers of a job that restarts: the restart plan, and the operator's command.

The plan is the file by which the next workers learn why the job was restarted and what to avoid. It lies in
the folder of the job's checkpoints, owner-only, and holds data alone: names of machines, numbers and
sentences. A file that is damaged, too large or of another version is refused as a whole.

``RecoveryConfig.on_decision`` is a command that reads a decision from its standard input. A process in
between waits for it and limits its time, so that the worker neither waits for it nor has to outlive it. That
process has a session of its own, because a launcher ends a worker with its process group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from torchscout.config import RecoveryConfig
from torchscout.decision.policy import RESTARTS
from torchscout.decision.types import Action, Decision, Failure, Recordable, parsed
from torchscout.errors import RestartPlanError
from torchscout.log import PREFIX, log
from torchscout.run.folder import Identity
from torchscout.utils import child_process
from torchscout.utils.identity import is_host_name
from torchscout.utils.private_files import make_folders, open_private, replace_text

__all__ = ["FOLDER_VARIABLE", "SCHEMA", "RestartPlan", "is_same", "start_command", "write_plans"]

_NAME = "restart-plan.json"
FOLDER_VARIABLE = "TORCHSCOUT_PLAN"
"""The environment variable by which an agent of ``--rdzv-backend=scout`` names the folder of its workers'
plan."""
SCHEMA = 1
"""Version of the file; other versions are refused."""
_MAX_BYTES = 1 << 20
_MAX_RESTARTS = 64
"""Restarts that are kept, the newest ones."""
_LEAST_TRUST = (Failure.STRAGGLER, Failure.OTHER, Failure.HANG, Failure.MACHINES_GONE, Failure.SDC)
"""From the failure after which most checkpoints can be trusted to that with the fewest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan(Recordable):
    """Why a job was restarted, and what its next workers do differently. The default is that of a new job."""

    kind: ClassVar[str] = "restart_plan"
    failure: Failure = Failure.OTHER
    """Determines the checkpoint that ``session.resume()`` loads."""
    excluded: tuple[str, ...] = ()
    """Machines that must not be used."""
    sentence: str = ""
    """The decision, in words, until its checkpoint has been loaded."""
    restarts: tuple[Decision, ...] = ()
    """All restarts of the job so far, oldest first; the last one is this one."""

    @property
    def is_stopped(self) -> bool:
        """Whether the job must not run again before someone removes the plan."""
        return any(each.action is Action.STOP for each in self.restarts)

    def after(self, decision: Decision) -> RestartPlan:
        """Return the plan for a decision that restarts or stops the job."""
        replaced = decision.hosts if decision.action is Action.REPLACE else ()
        # A plan that was not used yet still holds: the failure that trusts less decides.
        failures = (decision.failure, self.failure) if self.sentence else (decision.failure,)
        return RestartPlan(
            failure=max(failures, key=_LEAST_TRUST.index),
            excluded=tuple(dict.fromkeys((*self.excluded, *replaced))),
            sentence=decision.sentence,
            restarts=(*self.restarts, decision)[-_MAX_RESTARTS:],
        )

    def used(self) -> RestartPlan:
        """Return the plan after its checkpoint has been loaded, when its failure no longer applies."""
        return replace(self, failure=Failure.OTHER, sentence="")

    def including(self, other: RestartPlan) -> RestartPlan:
        """Return this plan with the restarts and excluded machines of another one that it does not know."""
        unknown = (each for each in other.restarts if not any(is_same(each, own) for own in self.restarts))
        return replace(
            self,
            excluded=tuple(dict.fromkeys((*other.excluded, *self.excluded))),
            restarts=(*unknown, *self.restarts)[-_MAX_RESTARTS:],
        )

    def reasons(self) -> dict[str, str]:
        """Return the excluded machines, each with the decision that excluded it."""
        why = dict.fromkeys(filter(is_host_name, self.excluded), "The restart plan excludes it.")
        for decision in self.restarts:
            if decision.action is Action.REPLACE:
                why |= {host: decision.sentence for host in decision.hosts if host in why}
        return why

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **Recordable.to_json(self)}

    @classmethod
    def from_json(cls, document: Any) -> RestartPlan:
        """Read what ``to_json`` returned; raises ``ValueError`` otherwise."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not a restart plan of version {SCHEMA}")
        if lacking := {each.name for each in fields(cls)} - document.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        plan: RestartPlan = parsed(cls, document)
        for each in plan.restarts:
            if each.action not in (*RESTARTS, Action.STOP):
                raise ValueError(f"not a decision to restart: {each.action.value}")
        return plan

    @staticmethod
    def path(folder: Path) -> Path:
        return folder / _NAME

    @classmethod
    def read(cls, folder: Path) -> RestartPlan:
        """Return the plan in this folder, or that of a new job if there is none.

        Raises ``RestartPlanError`` if there is one that cannot be relied on.
        """
        path = cls.path(folder)
        try:
            with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise RestartPlanError(path, error.strerror or str(error)) from error
        if len(content) > _MAX_BYTES:
            raise RestartPlanError(path, f"it has more than {_MAX_BYTES} bytes")
        try:
            return cls.from_json(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise RestartPlanError(path, f"{type(error).__name__}: {error}") from error

    def write(self, folder: Path) -> None:
        """Replace the plan in this folder; raises ``OSError`` if that fails."""
        make_folders(folder)
        replace_text(self.path(folder), json.dumps(self.to_json()) + "\n")


def write_plans(plan: RestartPlan, folders: Iterable[Path]) -> list[str]:
    """Write a plan to some folders of this machine; return what went wrong, in words.

    Every rank writes the same plan. What the last run decided after this one had begun is kept.
    """
    problems = []
    for folder in folders:
        try:
            found = RestartPlan.read(folder)
        except RestartPlanError:  # it is ignored everywhere else, too
            found = plan
        try:
            plan.including(found).write(folder)
        except OSError as error:
            problems.append(f"the restart plan could not be written: {error}")
    return problems


def is_same(decision: Decision, other: Decision) -> bool:
    """Whether they are one decision: a trainer may know more about it than an observer, such as devices."""
    names = ("step", "action", "ranks", "sentence")
    return all(getattr(decision, name) == getattr(other, name) for name in names)


_started: list[subprocess.Popen[bytes]] = []


def start_command(
    config: RecoveryConfig, decision: Decision, run: Identity, folder: Path | str | None = None
) -> None:
    """Start ``on_decision`` in a folder, by default the current one, and return at once. What goes wrong with
    it is logged, and changes nothing else."""
    command, seconds = config.on_decision, config.on_decision_seconds
    _started[:] = [each for each in _started if each.poll() is None]
    try:
        # A file, because writing to a pipe would wait for a command that does not read.
        with tempfile.TemporaryFile() as document:
            document.write(json.dumps(decision.to_json() | run.fields).encode() + b"\n")
            document.seek(0)
            arguments = (str(seconds), str(folder or Path.cwd()), *command)
            between = subprocess.Popen(
                child_process.command(__name__, *arguments),
                stdin=document,
                stdout=sys.__stderr__,
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        log.warning("on_decision: %s could not be started: %s", command[0], error)
        return
    _started.append(between)


def _wait(seconds: str, folder: str, *command: str) -> None:
    try:
        status = subprocess.run(command, cwd=folder, timeout=float(seconds), check=False).returncode
        problem = f"ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        problem = f"was ended after {seconds} s"
    except (OSError, ValueError) as error:
        problem = f"could not be started: {error}"
    if problem is not None:
        print(f"{PREFIX} on_decision: {command[0]} {problem}", file=sys.stderr)


if __name__ == "__main__":
    _wait(*sys.argv[3:])  # after what ``child_process.command`` needs itself
