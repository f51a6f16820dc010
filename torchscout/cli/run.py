"""`scout run`: starts a command with torchscout attached to every worker, without a change to its script."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.config import read_settings
from torchscout.cli.console import made_folder
from torchscout.config import RUN_DIR
from torchscout.launch import startup
from torchscout.launch.settings import VARIABLE, Settings
from torchscout.launch.template import document_of

__all__ = ["environment_of", "run"]

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With PyTorch 2.13, ranks that torchrun restarts over Gloo need this; see docs/doctor.md."""


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The command, such as torchrun ... train.py.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings; scout config > scout.toml writes such a file.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for incidents and records; default: a new scout-run-... here.")
    ] = None,
) -> None:
    """Run a command with torchscout attached to its training script, which stays as it is.

    scout run -- torchrun --nproc-per-node 8 train.py. The exit status is that of the command.
    """
    settings = read_settings(config, "--config")
    if shutil.which(command[0]) is None:
        raise typer.BadParameter(f"there is no command {command[0]!r}", param_hint="COMMAND")
    if run_dir is not None:
        settings = replace(settings, run_dir=str(made_folder(run_dir, "--run-dir")))
    elif settings.run_dir is None:
        name = f"scout-run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        settings = replace(settings, run_dir=name)
    settings = replace(settings, run_dir=str(Path(str(settings.run_dir)).absolute()))
    sys.stdout.flush()
    # The command takes this process's place: signals and the exit status are its own.
    os.execvpe(command[0], command, environment_of(settings, os.environ))


def environment_of(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which every Python process attaches torchscout."""
    folder = str(Path(startup.__file__).parent)
    others = [
        each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", folder)
    ]
    return {
        _OWN_STORE: "1",
        **environment,
        "PYTHONPATH": os.pathsep.join([folder, *others]),
        VARIABLE: json.dumps(document_of(settings)),
        RUN_DIR: str(settings.run_dir),
    }
