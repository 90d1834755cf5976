"""Commands that run a server: serve and demo."""

from pathlib import Path
from typing import Annotated

import typer

from client.cli_options import REFUSED
from client.terminal import Terminal

DataDir = Annotated[Path, typer.Option("--data-dir", help="Where the database, checkpoints and logs live.")]


def serve(
    host: Annotated[str, typer.Option("--host", help="Other than loopback only with an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    data_dir: DataDir = Path("octet-data"),
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="One API key per line.")] = None,
    pools: Annotated[Path | None, typer.Option("--pools", help="The pools as YAML; default: one of CPUs.")] = None,
    data_root: Annotated[list[Path] | None, typer.Option("--data-root", help="A folder that jobs may read.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Ranks at once in the cpu pool.")] = None,
) -> None:
    """Run Octet on this machine: API, dispatcher, database and a local Ray in one process."""
    try:
        from service.main import serve as run_server
    except ModuleNotFoundError as error:
        Terminal().complain(
            f"octet serve needs the package {error.name!r}, which is not installed. "
            "Install Octet with the extras that serving needs: pip install 'octet[service,worker,client]'"
        )
        raise typer.Exit(REFUSED) from error
    try:
        run_server(
            host=host,
            port=port,
            data_dir=data_dir,
            api_key_file=api_key_file,
            pools_file=pools,
            data_roots=tuple(data_root or ()),
            slots=slots,
        )
    except (OSError, ValueError) as error:
        Terminal().complain(str(error))
        raise typer.Exit(REFUSED) from error
