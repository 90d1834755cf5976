"""Commands of a server: serve, the processes of cluster mode, api, ingest and dispatcher, and copies of its database."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from octet.client.cli.options import REFUSED, Commands, require_extras
from octet.client.terminal import Terminal
from octet.client.text import num_bytes

DatabaseUrlFile = Annotated[
    Path | None,
    typer.Option("--database-url-file", envvar="OCTET_DATABASE_URL_FILE", help="File with the URL, postgresql://…"),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option("--log-format", envvar="OCTET_LOG_FORMAT", help="The log on stderr; json: one object a line. Default: text."),
]
DataDir = Annotated[Path, typer.Option("--data-dir", help="Where the database, checkpoints and logs live.")]


def serve(
    host: Annotated[str, typer.Option("--host", help="Other than loopback only with an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    data_dir: DataDir = Path("octet-data"),
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="API keys, one per line.")] = None,
    pools: Annotated[Path | None, typer.Option("--pools", help="The pools as YAML; default: one of CPUs.")] = None,
    quotas: Annotated[
        Path | None, typer.Option("--quotas", envvar="OCTET_QUOTAS_FILE", help="Quotas of roles and tenants, as YAML.")
    ] = None,
    data_root: Annotated[list[Path] | None, typer.Option("--data-root", help="A folder that jobs may read.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Ranks at once in the cpu pool.")] = None,
    log_format: LogFormat = None,
    internal_address: Annotated[
        str | None, typer.Option("--internal-address", help="HOST:PORT for reports, health and metrics alone.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", help="Serve https:// with this certificate, as PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The key of the certificate, as PEM.")] = None,
    oidc_issuer: Annotated[
        str | None, typer.Option("--oidc-issuer", help="The identity provider at which people sign in: https://…")
    ] = None,
    oidc_audience: Annotated[
        str | None, typer.Option("--oidc-audience", help="Its client, or the audience, that tokens are for.")
    ] = None,
    oidc_role: Annotated[
        list[str] | None, typer.Option("--oidc-role", metavar="GROUP=TENANT:ROLE", help="The role of a group; * is everyone.")
    ] = None,
) -> None:
    """Run Octet on this machine: API, dispatcher, database and a local Ray in one process."""
    require_extras("serve", "service", "worker")
    with _refusing():
        from octet.service.processes.sockets import bound

        bound(host, port).close()  # the rest takes seconds to import, and a port that is taken is said at once
        from octet.service.processes.embedded import serve as run_server

        given = {"host": host, "port": port, "data_dir": data_dir.resolve(), "api_keys_file": api_key_file, "pools_file": pools}
        given |= {"data_roots": tuple(data_root or ()), "tls_certificate": tls_certificate, "tls_key": tls_key}
        given |= {
            "internal_address": internal_address,
            "oidc_issuer": oidc_issuer,
            "oidc_audience": oidc_audience,
            "oidc_roles": _roles_of(oidc_role or []),
        }
        given |= {"quotas_file": quotas, "log_format": log_format}
        run_server(given=given, slots=slots)


def _roles_of(options: list[str]) -> dict[str, str] | None:
    if wrong := next((option for option in options if "=" not in option), None):
        raise typer.BadParameter(f"got {wrong!r}; allowed: GROUP=TENANT:ROLE", param_hint="--oidc-role")
    return {group: role for group, _, role in (option.rpartition("=") for option in options)} or None  # groups may have =


def api(database_url_file: DatabaseUrlFile = None, log_format: LogFormat = None) -> None:
    """Cluster mode: the API alone, on PostgreSQL. Configured by OCTET_* variables; see docs/deploy.md."""
    require_extras("api", "service")
    with _refusing():
        from octet.service.processes.api import api as run_api

        run_api(database_url_file=database_url_file, log_format=log_format)


def ingest(database_url_file: DatabaseUrlFile = None, log_format: LogFormat = None) -> None:
    """Cluster mode: where ranks report, apart from the API. Listens on OCTET_INTERNAL_ADDRESS; see docs/deploy.md."""
    require_extras("ingest", "service")
    with _refusing():
        from octet.service.processes.api import ingest as run_ingest

        run_ingest(database_url_file=database_url_file, log_format=log_format)


def dispatcher(
    ray_address: Annotated[str, typer.Option("--ray-address", envvar="OCTET_RAY_ADDRESS", help="The Ray head: host:port.")],
    ray_token_file: Annotated[
        Path, typer.Option("--ray-token-file", envvar="RAY_AUTH_TOKEN_PATH", help="The cluster's token.")
    ],
    database_url_file: DatabaseUrlFile = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", envvar="OCTET_AUTOSCALE", help="Tell Ray's autoscaler what the queue wants.")
    ] = False,
    metrics_address: Annotated[
        str,
        typer.Option("--metrics-address", envvar="OCTET_METRICS_ADDRESS", help="Serve metrics at HOST:PORT; default: nowhere."),
    ] = "",
    log_format: LogFormat = None,
) -> None:
    """Cluster mode: what runs jobs on a Ray cluster. Several may run; one leads. See docs/deploy.md."""
    require_extras("dispatcher", "service")
    with _refusing():
        from octet.service.processes.dispatcher import dispatch

        dispatch(
            ray_address=ray_address,
            ray_token_file=ray_token_file,
            database_url_file=database_url_file,
            autoscale=autoscale,
            metrics_address=metrics_address,
            log_format=log_format,
        )


def backup(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The copy, a file that does not exist yet.")],
    data_dir: DataDir = Path("octet-data"),
    database_url_file: DatabaseUrlFile = None,
) -> None:
    """Copy the database into one file, also while servers use it. Checkpoints and exports are files already."""
    require_extras("backup", "service")
    with _refusing(), Terminal().spinner_on_stderr("copying"):
        from octet.service.db.backup import back_up
        from octet.service.processes.startup import stored_database

        with stored_database(data_dir, database_url_file) as database:
            num_rows = back_up(database, path)
            name = database.name
    Terminal().show(Text(f"{path} ({num_bytes(path.stat().st_size)}) has all {num_rows:,} rows of {name}."))


def restore(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `octet backup` has written, by this version or an older one.")
    ],
    data_dir: DataDir = Path("octet-data"),
    database_url_file: DatabaseUrlFile = None,
) -> None:
    """Fill an empty database from a backup, of SQLite or PostgreSQL alike. Start its servers afterwards."""
    require_extras("restore", "service")
    with _refusing(), Terminal().spinner_on_stderr("restoring"):
        from octet.service.db.backup import restore as fill
        from octet.service.processes.startup import stored_database

        with stored_database(data_dir, database_url_file, alone=True) as database:
            num_rows = fill(path, database)
            name = database.name
    Terminal().show(Text(f"{name} has all {num_rows:,} rows of {path}."))


@contextmanager
def _refusing() -> Iterator[None]:
    """Say in one line why a server cannot start."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        Terminal().complain(str(error))
        raise typer.Exit(REFUSED) from error


COMMANDS: Commands = {
    "serve": serve,
    "api": api,
    "ingest": ingest,
    "dispatcher": dispatcher,
    "backup": backup,
    "restore": restore,
}
