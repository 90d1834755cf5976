"""The `octet` command. Each command is a function in a `cli_*` module; this one puts them together.

Exit status: 0 done (submit --watch, watch and demo: every job succeeded), 1 a job failed or was cancelled, 2 usage or a
request that has to change, 3 no server that answers, 130 interrupted.
"""

from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from client import cli_import, cli_jobs, cli_server, cli_show
from client.cli_options import exit_status
from client.errors import OctetError
from client.terminal import Terminal


class _Commands(TyperGroup):
    """Turns our errors into a message on standard error and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OctetError as error:
            Terminal().complain(str(error))
            raise typer.Exit(exit_status(error)) from error


def build_app() -> typer.Typer:
    """All commands, in the order in which --help shows them."""
    app = typer.Typer(
        name="octet",
        cls=_Commands,
        help="FP8 training as a service.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    commands: dict[str, Callable[..., None]] = {
        "serve": cli_server.serve,
        "demo": cli_server.demo,
        "api": cli_server.api,
        "dispatcher": cli_server.dispatcher,
        "submit": cli_jobs.submit,
        "validate": cli_jobs.validate,
        "watch": cli_jobs.watch,
        "cancel": cli_jobs.cancel,
        "list": cli_show.list_jobs,
        "show": cli_show.show,
        "logs": cli_show.logs,
        "events": cli_show.events,
        "metrics": cli_show.metrics,
        "checkpoints": cli_show.checkpoints,
        "attempts": cli_show.attempts,
        "levels": cli_show.levels,
        "pools": cli_show.pools,
        "version": version,
    }
    for name, command in commands.items():
        app.command(name)(command)
    imports = typer.Typer(help="Write a job file from another project's configuration.", no_args_is_help=True)
    imports.command("accelerate")(cli_import.accelerate)
    imports.callback()(_only_subcommands)
    app.add_typer(imports, name="import")
    return app


def _only_subcommands() -> None:
    """Keep `octet import` a group though it has one command."""


def version() -> None:
    """Print the version of this client."""
    Terminal().show(Text(installed_version("octet")))


def main() -> None:
    build_app()(prog_name="octet")


if __name__ == "__main__":
    main()
