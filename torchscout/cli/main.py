"""The `scout` command."""

from __future__ import annotations

import typer

from torchscout.cli.campaign.command import app as campaign
from torchscout.cli.checkpoint.command import app as checkpoint
from torchscout.cli.demo.command import demo
from torchscout.cli.discover.command import discover
from torchscout.cli.doctor.command import doctor
from torchscout.cli.explain.command import explain
from torchscout.cli.status import status

__all__ = ["app"]

app = typer.Typer(
    help="Names the sick rank, machine or process group of a distributed training job.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(discover)
app.command()(doctor)
app.command()(explain)
app.command()(status)
app.add_typer(campaign, name="campaign")
app.add_typer(checkpoint, name="checkpoint")
