"""`octet login` and `octet logout`: the token of a person in the place of an API key."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from octet.client import render
from octet.client.api import Client
from octet.client.cli.options import DEFAULT_URL, Commands, Url, client_of
from octet.client.errors import SignInFailed
from octet.client.sign_in import DeviceCode, Provider, TokenFile
from octet.client.terminal import Terminal


def login(
    url: Url = DEFAULT_URL,
    shows_token: Annotated[bool, typer.Option("--token", help="Print the token, for the page's field for keys.")] = False,
) -> None:
    """Sign in at the server's identity provider, with a browser. OCTET_API_KEY goes before it."""
    terminal = Terminal()
    present = TokenFile().present(Client(url).url)
    if shows_token and present is not None:
        with suppress(SignInFailed):  # it has expired: sign in again
            terminal.show(Text(present()))
            return

    def show(shown: DeviceCode) -> None:
        whole = f", or open {shown.whole_address}" if shown.whole_address else ""
        entered = f" and enter {shown.code}{whole}." if shown.code else " in a browser on this machine."
        terminal.note(f"Open {shown.address}{entered}")

    with client_of(url, None) as client:
        found = client.sign_in()
    with Provider(found) as provider, terminal.spinner_on_stderr("waiting for you to sign in"):
        token = provider.sign_in(show)
    with client_of(url, token.token) as client:
        list(client.pools())  # the server accepts it, or says why not
    TokenFile().put(client.url, token)
    until = (
        "and is refreshed" if token.refresh_token else f"until {render.moment(datetime.fromtimestamp(token.expires_at, UTC))}"
    )
    terminal.note(f"You are signed in to {client.url}. The token works {until}.")
    if shows_token:
        terminal.show(Text(token.token))


def logout(url: Url = DEFAULT_URL) -> None:
    """Forget the token for a server. It works until it expires, for whoever has a copy."""
    tokens, server = TokenFile(), Client(url).url
    was_there = tokens.find(server) is not None
    tokens.put(server, None)
    Terminal().show(Text(f"You are signed out of {server}." if was_there else f"You were not signed in to {server}."))


COMMANDS: Commands = {"login": login, "logout": logout}
