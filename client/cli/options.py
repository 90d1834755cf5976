"""The options that commands share, and what an error means for the exit status."""

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from octet.api_schemas import Job
from octet.client.api import Client
from octet.client.errors import (
    AmbiguousJob,
    ApiError,
    ConnectionFailed,
    JobFileError,
    NoSuchJob,
    OctetError,
    ServerFailed,
    SignInFailed,
    SpecRefused,
    UnexpectedAnswer,
)
from octet.client.job_file import parse_value
from octet.client.sign_in import TokenFile
from octet.client.terminal import Terminal

Commands = Mapping[str, Callable[..., None]]
"""A module's commands by their names, in the order in which --help shows them."""

DEFAULT_URL = "http://127.0.0.1:8000"

FAILED = 1  # a job failed or was cancelled
REFUSED = 2  # usage, or a request that has to change
LEFT_OVER = 3  # of `octet import`: something that matters is not in the job
UNREACHABLE = 4  # no server, or one that cannot answer
INTERRUPTED = 130

Url = Annotated[str, typer.Option("--url", envvar="OCTET_URL", help="The server. Its API key: OCTET_API_KEY.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: one document, or one per line of a stream.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, job_…, the beginning of it, or its name.")]
JobFile = Annotated[str, typer.Argument(metavar="FILE", help="A job as YAML or JSON; - reads standard input.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field: --set training.steps=50")
]


def varied(text: str) -> tuple[str, list[Any]]:
    """Read a --vary: the path of a field, and its values."""
    path, equals, values = text.partition("=")
    if not equals or not path:
        raise typer.BadParameter(f"got {text!r}; allowed: path.to.field=value,value", param_hint="--vary")
    return path.strip(), [parse_value(value, f"--vary {text}") for value in values.split(",")]


def connect(url: str) -> Client:
    """Return a client of the server at `url`, with the key of OCTET_API_KEY, or the token of `octet login`."""
    return client_of(url, os.environ.get("OCTET_API_KEY") or TokenFile().present(url))


def client_of(url: str, api_key: "str | Callable[[], str] | None") -> Client:
    """Return a client of the server at `url`, with a key or a token."""
    try:
        return Client(url, api_key, patience_s=0.5)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from error


COMPARISON_ID = re.compile(r"cmp_[0-7][0-9a-hjkmnp-tv-z]{25}")


def find_job(client: Client, text: str) -> Job:
    """Return the job that was meant by an id, the beginning of one, or a name. Raises NoSuchJob and AmbiguousJob."""
    if COMPARISON_ID.fullmatch(text):
        raise typer.BadParameter(f"got {text}, a comparison; allowed: a job. See the comparison with: octet compare {text}")
    job = client.find(text)
    if job is None:
        raise NoSuchJob(text)
    return job


def find_to_read(client: Client, text: str) -> Job:
    """Do the same for a command that only reads: of several jobs with the name, the newest is meant, and a note says so."""
    try:
        return find_job(client, text)
    except AmbiguousJob as error:
        newest = error.jobs[0]
        if newest.name != text:
            raise
        Terminal().note(f"Several jobs have the name {text}; this is the newest, {newest.id}.")
        return newest


PACKAGES_OF_EXTRAS = {"service": ("fastapi", "ray"), "worker": ("torch",), "models": ("transformers",)}
"""Packages that stand for each extra: whoever has them has installed it."""


def require_extras(command: str, *extras: str) -> None:
    """Exit with one sentence that says how to install the extras, if a package of one is missing."""
    wanted = [package for extra in extras for package in PACKAGES_OF_EXTRAS[extra]]
    missing = [package for package in wanted if find_spec(package) is None]
    if missing:
        install = f"pip install 'octet-fp8[{','.join(extras)}]'"
        Terminal().complain(f"octet {command} needs {', '.join(missing)}; install it with: {install}")
        raise typer.Exit(REFUSED)


def exit_status(error: OctetError) -> int:
    """Return the exit status that an error means."""
    match error:
        case ConnectionFailed() | UnexpectedAnswer() | ServerFailed():
            return UNREACHABLE
        case ApiError() if error.problem.status >= 500:
            return UNREACHABLE
        case ApiError() | SignInFailed() | SpecRefused() | JobFileError() | AmbiguousJob() | NoSuchJob():
            return REFUSED
        case _:
            return FAILED
