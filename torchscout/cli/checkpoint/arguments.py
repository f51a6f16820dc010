"""The arguments that several ``scout checkpoint`` commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchscout.cli.checkpoint.contents import Contents, contents_of
from torchscout.cli.console import refusing
from torchscout.errors import CheckpointError

__all__ = ["Folders", "JobName", "WorldSize", "contents_in"]

Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Checkpoint folders of one job, on disk or in memory.")
]
JobName = Annotated[str | None, typer.Option("--job", help="The job's name, if a folder holds several jobs.")]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", help="The number of ranks, if the job ran with several.")
]


def contents_in(folders: list[Path], job: str | None, world_size: int | None) -> Contents:
    """What the folders hold of one job; a wrong argument ends the command."""
    with refusing("DIR", OSError, CheckpointError):
        return contents_of(folders, job, world_size)
