"""Put the commands of `octet` together and run them.

Exit status: 0 done (submit --watch, watch and demo: every job succeeded), 1 a job failed or was cancelled, 2 usage or a
request that has to change, 3 of import: something that matters was left over, 4 no server that answers, 130 interrupted.
"""

from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from octet.client.cli import compare, data, demo, imports, jobs, keys, plans, results, server, show, sign_in, support
from octet.client.cli.options import DEFAULT_URL, Url, exit_status
from octet.client.cli.overview import show_overview
from octet.client.errors import OctetError
from octet.client.terminal import Terminal

MEANT = {
    "submit": "run start create apply train launch new",
    "list": "ls jobs ps queue",
    "show": "status describe info get inspect",
    "logs": "tail log output",
    "pause": "suspend hold",
    "resume": "continue unpause",
    "retry": "restart rerun extend",
    "clone": "copy duplicate",
    "delete": "rm remove purge",
    "change": "edit set update patch label priority",
    "compare": "diff sweep versus",
    "cancel": "stop kill abort terminate",
    "metrics": "plot curve loss",
    "watch": "follow attach monitor top",
    "download": "pull fetch checkpoint",
    "serve": "server up start-server",
    "login": "signin sign-in auth authenticate",
    "logout": "signout sign-out",
    "usage": "quota quotas use costs",
    "doctor": "check diagnose env",
    "debug": "report bundle",
}
"""Words of other tools that people type, by the command that is meant."""


class _Commands(TyperGroup):
    """Turn our errors into a message on standard error and an exit status, and name the command that was meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        meant = [command for command, words in MEANT.items() if args and args[0].casefold() in words.split()]
        if meant and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant[0]!r}?")
        return super().resolve_command(ctx, args)

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
        help="FP8 training as a service. Without a command: what is going on.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (server, demo, jobs, plans, compare, show, results, sign_in, support):
        for name, command in module.COMMANDS.items():
            app.command(name)(command)
    app.command("version")(version)
    importers = typer.Typer(help="Write a job, or a part of one, from another project's file.", no_args_is_help=True)
    for name, command in imports.COMMANDS.items():
        importers.command(name)(command)
    importers.callback()(_only_subcommands)
    app.callback()(_options)
    app.add_typer(importers, name="import")
    preparing = typer.Typer(help="Prepare what jobs read.", no_args_is_help=True)
    preparing.command("tokenize")(data.tokenize)
    preparing.callback()(_only_subcommands)
    app.add_typer(preparing, name="data")
    managing = typer.Typer(help="Manage a server's API keys.", no_args_is_help=True)
    for name, command in keys.COMMANDS.items():
        managing.command(name)(command)
    app.add_typer(managing, name="keys")
    return app


def _only_subcommands() -> None:
    """Keep `octet import` and `octet data` groups though each has one command."""


def version() -> None:
    """Print the version of this client."""
    Terminal().show(Text(installed_version("octet-fp8")))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        Terminal().show(Text(f"octet {installed_version('octet-fp8')}"))
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """FP8 training as a service. Without a command: what is going on."""
    if context.invoked_subcommand is None:
        show_overview(url)


def main() -> None:
    build_app()(prog_name="octet")
