"""`octet keys`: make, list, rotate and revoke the API keys of a server."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.text import Text

from octet.api_schemas.keys import ApiKey, KeyRole, KeyRotation, KeySpec, NewApiKey
from octet.client import render
from octet.client.cli.options import DEFAULT_URL, AsJson, Commands, Url, connect
from octet.client.terminal import Terminal

KeyId = Annotated[str, typer.Argument(metavar="KEY", help="A key's id, key_…")]
ExpiresDays = Annotated[
    float | None, typer.Option("--expires-days", min=0.001, max=3650, help="Days until it ends. Default: it does not.")
]


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The person or the service that uses it.")],
    role: Annotated[KeyRole, typer.Option("--role", help="viewer reads; submitter also submits; admin also manages keys.")],
    tenant: Annotated[str | None, typer.Option("--tenant", help="The project. Default: that of your own key.")] = None,
    expires_days: ExpiresDays = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a key, and show its secret this once."""
    try:
        wanted = KeySpec(name=name, role=role, tenant=tenant, expires_in_s=_seconds(expires_days))
    except ValueError as error:
        message = (
            f"got {name!r} and {tenant!r}; allowed: a name of up to 100 characters, a tenant of up to 32 of a-z, 0-9 and -"
        )
        raise typer.BadParameter(message, param_hint="NAME, --tenant") from error
    with connect(url) as client:
        _show_made(client.create_key(wanted), as_json)


def list_keys(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys, newest first: role, last use, and until when they work."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.keys())
    if as_json:
        terminal.show_json_array(found)
    else:
        terminal.show(render.keys_table(found, datetime.now(UTC)))


def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[
        float, typer.Option("--overlap-hours", min=0, max=744, help="For so long the old key still works.")
    ] = 24.0,
    expires_days: Annotated[
        float | None,
        typer.Option("--expires-days", min=0.001, max=3650, help="Of the new key. Default: as long as the old one."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a key in the place of another one, which ends after the overlap."""
    overlap_s = round(timedelta(hours=overlap_hours).total_seconds())
    with connect(url) as client:
        made = client.rotate_key(key_id, KeyRotation(overlap_s=overlap_s, expires_in_s=_seconds(expires_days)))
    _show_made(made, as_json)


def revoke(key_id: KeyId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Revoke a key: within a second nothing accepts it, and its event streams end."""
    with connect(url) as client:
        revoked: ApiKey = client.revoke_key(key_id)
    terminal = Terminal()
    terminal.show_json(revoked) if as_json else terminal.show(Text(f"{revoked.id} ({revoked.name}) is revoked."))


def _seconds(days: float | None) -> int | None:
    return None if days is None else round(timedelta(days=days).total_seconds())


def _show_made(key: NewApiKey, as_json: bool) -> None:
    """Print the secret alone on standard output, so that a script can keep it, and the rest beside it."""
    terminal = Terminal()
    if as_json:
        terminal.show_json(key)
        return
    until = "" if key.expires_at is None else f", until {render.moment(key.expires_at)}"
    terminal.note(f"{key.id}: {key.name}, {key.role} of {key.tenant}{until}.")
    terminal.note("The secret is shown this once; clients send it by OCTET_API_KEY.")
    terminal.show(Text(key.secret))


COMMANDS: Commands = {"create": create, "list": list_keys, "rotate": rotate, "revoke": revoke}
