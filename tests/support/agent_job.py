"""A script for torchrun agents without torch: it says where it runs, and fails or ends when it is asked to.

Arguments: a folder. Each worker writes ``started-HOST-PID`` there and waits for ``fail-PID`` or ``end``. On
the former it leaves as SCOUT's workers do, with a restart plan: the file holds the action and its machines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torchscout.decision.types import Action, Decision, Failure
from torchscout.run.restart import FOLDER_VARIABLE, RestartPlan
from torchscout.utils.identity import host_name


def main() -> None:
    folder = Path(sys.argv[1])
    rank, size, pid = os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid()
    (folder / f"started-{host_name()}-{pid}").write_text(json.dumps([rank, size]))
    while True:
        time.sleep(0.1)
        if (folder / "end").exists():
            return
        if (folder / f"fail-{pid}").exists():
            leave((folder / f"fail-{pid}").read_text().split())


def leave(words: list[str]) -> None:
    action, *hosts = words
    decision = Decision(
        step=1,
        action=Action[action],
        failure=Failure.SDC,
        ranks=(),
        hosts=tuple(hosts),
        sentence=f"{' '.join(words)}: it is bad.",
    )
    plan = Path(os.environ[FOLDER_VARIABLE])
    RestartPlan.read(plan).after(decision).write(plan)
    os._exit(143)


if __name__ == "__main__":
    main()
