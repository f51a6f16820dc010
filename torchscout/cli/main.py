"""The `scout` command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import torchscout
from torchscout.cli.campaign import app as campaign
from torchscout.cli.checkpoint.command import app as checkpoint
from torchscout.cli.console import checked
from torchscout.cli.demo.command import demo
from torchscout.cli.discover import discover
from torchscout.cli.doctor.command import doctor
from torchscout.cli.explain.command import explain
from torchscout.cli.status import status

__all__ = ["app"]


class _Group(TyperGroup):
    """Lists commands with their whole first paragraph; typer cuts it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        helps = {name: self.commands[name].help or "" for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, " ".join(text.split("\n\n")[0].split())) for name, text in helps.items()]
            )


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (demo, discover, doctor, explain, status):
    app.command()(checked(command))
for group, name in ((campaign, "campaign"), (checkpoint, "checkpoint")):
    for each in group.registered_commands:
        assert each.callback is not None
        each.callback = checked(each.callback)
    app.add_typer(group, name=name, cls=_Group)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"torchscout {torchscout.__version__}")
        raise typer.Exit


@app.callback()
def scout(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Find the faulty rank, machine or process group of a distributed training job."""
