"""The `scout` command. A command's module is imported when the command is used."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import torchscout
from torchscout.cli.console import checked

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "config": (
        "torchscout.cli.config:config",
        "Print a scout.toml with all settings of scout run, their defaults and explanations.",
    ),
    "demo": (
        "torchscout.cli.demo.command:demo",
        "Inject a slow rank, a flipped bit and a hang into a small training job, and recover from each.",
    ),
    "discover": (
        "torchscout.cli.discover.command:discover",
        "Execute every admitted expert shape, and find the few that represent all of them.",
    ),
    "doctor": (
        "torchscout.cli.doctor.command:doctor",
        "Check whether this machine is ready for a long run, and show what to fix.",
    ),
    "explain": (
        "torchscout.cli.explain:explain",
        "Explain why a job hangs, from its Flight Recorder dumps.",
    ),
    "hosts": (
        "torchscout.cli.hosts:hosts",
        "List the machines that the recovery policy decided to replace.",
    ),
    "preflight": (
        "torchscout.cli.preflight:preflight",
        "Test the devices, machines and links of a job before it starts.",
    ),
    "report": (
        "torchscout.cli.report:report",
        "Write what happened in a run, and the evidence for it, as one HTML page that needs no network.",
    ),
    "simulate": (
        "torchscout.cli.simulate:simulate",
        "Decide random faults in a job on paper, of up to 131,072 ranks, and compare with the truth.",
    ),
    "status": (
        "torchscout.cli.status:status",
        "Show whether a job is running, finished, interrupted, failed or killed, and its incidents.",
    ),
    "watch": (
        "torchscout.cli.watch:watch",
        "Show a run while it goes on: the views of scout report, on a page that follows the run.",
    ),
    "run": (
        "torchscout.cli.run:run",
        "Run a command with torchscout attached to its training script, which stays as it is.",
    ),
    "campaign": (
        "torchscout.cli.campaign:app",
        "Inject faults into real training jobs and count how many are found.",
    ),
    "checkpoint": (
        "torchscout.cli.checkpoint.command:app",
        "Inspect and manage a job's checkpoint folders.",
    ),
}
"""Where each command is, and the first paragraph of its help, so that `scout --help` imports none of them."""


class _Group(TyperGroup):
    """Lists commands with their whole first paragraph; typer cuts it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(ctx)])

    def summary(self, name: str) -> str:
        return " ".join((self.commands[name].help or "").split("\n\n")[0].split())


class _Commands(_Group):
    """The commands of ``COMMANDS``, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def summary(self, name: str) -> str:
        return COMMANDS[name][1]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _loaded(cmd_name)
        return super().get_command(ctx, cmd_name)


_STYLE: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


@cache
def _loaded(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(**_STYLE)
        # What follows the first word of a command that is run belongs to that command.
        alone.command(name, context_settings={"allow_interspersed_args": name != "run"})(checked(found))
        return typer.main.get_command(alone)
    for each in found.registered_commands:
        assert each.callback is not None
        each.callback = checked(each.callback)
    group = typer.Typer(**_STYLE)
    group.add_typer(found, name=name, cls=_Group)
    return typer.main.get_group(group).commands[name]


app = typer.Typer(cls=_Commands, no_args_is_help=True, **_STYLE)


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
