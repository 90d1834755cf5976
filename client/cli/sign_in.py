"""`octet login` and `octet logout`: the token of a person in the place of an API key."""

from datetime import UTC, datetime

from rich.text import Text

from octet.client import render
from octet.client.api import Client
from octet.client.cli.options import DEFAULT_URL, Commands, Url, client_of
from octet.client.sign_in import DeviceCode, Provider, TokenFile
from octet.client.terminal import Terminal


def login(url: Url = DEFAULT_URL) -> None:
    """Sign in at the server's identity provider, with a browser on any device. OCTET_API_KEY goes before it."""
    terminal = Terminal()

    def show(shown: DeviceCode) -> None:
        whole = f", or open {shown.whole_address}" if shown.whole_address else ""
        terminal.note(f"Open {shown.address} and enter {shown.code}{whole}.")

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
    terminal.show(Text(f"You are signed in to {client.url}. The token works {until}."))


def logout(url: Url = DEFAULT_URL) -> None:
    """Forget the token for a server. It works until it expires, for whoever has a copy."""
    tokens, server = TokenFile(), Client(url).url
    was_there = tokens.find(server) is not None
    tokens.put(server, None)
    Terminal().show(Text(f"You are signed out of {server}." if was_there else f"You were not signed in to {server}."))


COMMANDS: Commands = {"login": login, "logout": logout}
