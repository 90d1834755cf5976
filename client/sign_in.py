"""Sign a person in at the identity provider of a server, and keep the token.

By the device authorization grant (RFC 8628), which works with a browser on any device; at a provider without it by a code that
the browser of this machine brings back to it (RFC 8252), with PKCE (RFC 7636), so that the code alone is of no use.

Tokens are in one file of the user's own folder for settings, which nobody else can read. Each is sent to the server that it
was fetched for and to no other, and is refreshed shortly before it expires, if the provider gave what that takes.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import typer

from octet.api_schemas.keys import SignIn
from octet.client.connection import host_of, is_loopback, trusted
from octet.client.errors import SignInFailed

_FILE = "tokens.json"
_DEVICE_CODE = "urn:ietf:params:oauth:grant-type:device_code"
_DISCOVERY = "/.well-known/openid-configuration"
_ANSWER_S = 10.0
_EARLY_S = 30.0
"""A token is refreshed so long before it expires: the next request may take that long to arrive."""
_SLOWER_S = 5.0  # RFC 8628, section 3.5
_SIGN_IN_S = 600.0
"""The time that a person has to sign in in a browser."""


@dataclass(frozen=True)
class StoredToken:
    """A token as it is kept. expires_at: in seconds since 1970. token_endpoint, client_id: how to refresh it."""

    token: str
    expires_at: float
    audience: str
    token_endpoint: str
    client_id: str
    refresh_token: str | None = None


@dataclass(frozen=True)
class DeviceCode:
    """Shown to a person: the address to go to and the code to enter there. None: there is nothing to enter."""

    address: str
    code: str | None = None
    whole_address: str | None = None
    """The address with the code in it, if the provider has one."""


class Provider:
    """The identity provider of a server. Use it as a context manager."""

    def __init__(self, sign_in: SignIn) -> None:
        """Ask it for its addresses. Raises SignInFailed."""
        self._sign_in = sign_in
        self._http = _http_to(sign_in.issuer)
        discovery = _answer_of(self._http, "GET", sign_in.issuer.rstrip("/") + _DISCOVERY)
        self._token_endpoint = str(discovery.get("token_endpoint"))
        self._device_endpoint = discovery.get("device_authorization_endpoint")
        self._code_endpoint = discovery.get("authorization_endpoint")
        endpoints = [str(each) for each in (self._device_endpoint, self._code_endpoint) if each is not None]
        if (
            discovery.get("issuer") != sign_in.issuer
            or not endpoints
            or not all(map(_is_safe, (*endpoints, self._token_endpoint)))
        ):
            self._http.close()
            raise SignInFailed(
                f"the identity provider {sign_in.issuer} has no device authorization (RFC 8628), and no authorization codes, "
                "by https in its discovery document. Ask the operator of the server to allow one of them, or for an API key"
            )

    def __enter__(self) -> "Provider":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def sign_in(self, show: Callable[[DeviceCode], None], sleep: Callable[[float], None] = time.sleep) -> StoredToken:
        """Show a person where to go, and wait until they have signed in. Raises SignInFailed if they do not."""
        return self._by_device(show, sleep) if self._device_endpoint is not None else self._by_code(show)

    def _by_device(self, show: Callable[[DeviceCode], None], sleep: Callable[[float], None]) -> StoredToken:
        asked = {"client_id": self._sign_in.client_id, "scope": " ".join(self._sign_in.scopes)}
        given = _answer_of(self._http, "POST", str(self._device_endpoint), asked)
        show(DeviceCode(given["verification_uri"], given["user_code"], given.get("verification_uri_complete")))
        wait_s, ends_at = float(given.get("interval", _SLOWER_S)), time.monotonic() + float(given["expires_in"])
        form = {"grant_type": _DEVICE_CODE, "device_code": given["device_code"], "client_id": self._sign_in.client_id}
        while time.monotonic() < ends_at:
            sleep(wait_s)
            answer = _answer_of(self._http, "POST", self._token_endpoint, form, allowed=("authorization_pending", "slow_down"))
            if answer.get("error") is None:
                return _stored(answer, self._sign_in.audience, self._token_endpoint, self._sign_in.client_id)
            wait_s += _SLOWER_S * (answer["error"] == "slow_down")
        raise SignInFailed("nobody has entered the code in time. Try again: octet login")

    def _by_code(self, show: Callable[[DeviceCode], None]) -> StoredToken:
        verifier, state = secrets.token_urlsafe(48), secrets.token_urlsafe(16)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        with _Redirected() as redirected:
            asked = {"response_type": "code", "client_id": self._sign_in.client_id, "scope": " ".join(self._sign_in.scopes)}
            asked |= {"redirect_uri": redirected.address, "state": state}
            asked |= {"code_challenge": challenge, "code_challenge_method": "S256"}
            show(DeviceCode(f"{self._code_endpoint}?{urlencode(asked)}"))
            brought = redirected.wait(state)
        if brought.get("iss", self._sign_in.issuer) != self._sign_in.issuer:
            raise SignInFailed("another identity provider has answered; nothing is sent to it. Sign in again: octet login")
        if "code" not in brought:
            words = brought.get("error_description") or brought.get("error") or "no code"
            raise SignInFailed(f"the identity provider refuses it: {words}. Sign in again: octet login")
        form = {"grant_type": "authorization_code", "code": brought["code"], "code_verifier": verifier}
        form |= {"redirect_uri": redirected.address, "client_id": self._sign_in.client_id}
        answer = _answer_of(self._http, "POST", self._token_endpoint, form)
        return _stored(answer, self._sign_in.audience, self._token_endpoint, self._sign_in.client_id)


class _Redirected(HTTPServer):
    """Listens on a free port of loopback until the browser is sent there by the provider."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _BrowserAnswer)
        self.address = f"http://127.0.0.1:{self.server_port}/"
        self.brought: dict[str, str] = {}
        self.timeout = 1.0

    def wait(self, state: str) -> dict[str, str]:
        """Return what the browser brings of a sign-in; what has another state is of none of ours. Raises SignInFailed."""
        ends_at = time.monotonic() + _SIGN_IN_S
        while time.monotonic() < ends_at:
            self.handle_request()
            if hmac.compare_digest(self.brought.get("state", ""), state):
                return self.brought
        raise SignInFailed("nobody has signed in in time. Try again: octet login")


class _BrowserAnswer(BaseHTTPRequestHandler):
    server: _Redirected
    timeout = 5

    def do_GET(self) -> None:
        self.server.brought = dict(parse_qsl(urlsplit(self.path).query))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"You can close this and go back to the terminal.")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the code out of the terminal."""


class TokenFile:
    """The tokens of one user, by the URLs of their servers."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or Path(typer.get_app_dir("octet"))) / _FILE

    def find(self, url: str) -> StoredToken | None:
        """Return the token for a server, expired or not. Raises SignInFailed for a file that cannot be read."""
        found = self._read().get(url.rstrip("/"))
        return None if found is None else StoredToken(**found)

    def put(self, url: str, token: StoredToken | None) -> None:
        """Keep the token for a server; None forgets it."""
        tokens = self._read()
        tokens.pop(url.rstrip("/"), None)
        if token is not None:
            tokens[url.rstrip("/")] = asdict(token)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=self._path.parent, prefix=_FILE)  # 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(tokens, file, indent=1)
        os.replace(unfinished, self._path)

    def present(self, url: str) -> Callable[[], str] | None:
        """Return what returns the present token for a server, and refreshes it; None if nobody has signed in there."""
        return (lambda: self._present(url)) if self.find(url) is not None else None

    def _present(self, url: str) -> str:
        stored = self.find(url)
        if stored is None:
            raise SignInFailed(f"nobody is signed in to {url} any more. Sign in: octet login")
        if time.time() < stored.expires_at - _EARLY_S:
            return stored.token
        try:
            refreshed = _refreshed(url, stored)
        except SignInFailed:
            again = self.find(url)  # another process may have refreshed it, and a provider may allow that once
            if again is None or again == stored or time.time() > again.expires_at:
                raise
            return again.token
        self.put(url, refreshed)
        return refreshed.token

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SignInFailed(f"{self._path} cannot be read: {error}. Remove it and sign in again: octet login") from error
        return found


def _refreshed(url: str, stored: StoredToken) -> StoredToken:
    if stored.refresh_token is None:
        raise SignInFailed(f"your sign-in to {url} has expired. Sign in again: octet login")
    form = {"grant_type": "refresh_token", "refresh_token": stored.refresh_token, "client_id": stored.client_id}
    with _http_to(stored.token_endpoint) as http:
        answer = _answer_of(http, "POST", stored.token_endpoint, form)
    answer = {"refresh_token": stored.refresh_token, **answer}
    return _stored(answer, stored.audience, stored.token_endpoint, stored.client_id)


def _stored(answer: Mapping[str, Any], audience: str, token_endpoint: str, client_id: str) -> StoredToken:
    """Choose the token that is for the server: the access token if it is, else the one that says who the person is."""
    for name in ("access_token", "id_token"):
        token = str(answer.get(name))
        claims = _claims_of(token)
        audiences = claims.get("aud")
        if audience in (audiences if isinstance(audiences, list) else [audiences]) and "exp" in claims:
            return StoredToken(token, float(claims["exp"]), audience, token_endpoint, client_id, answer.get("refresh_token"))
    raise SignInFailed(
        f"the identity provider gave no token for the audience {audience!r}. Ask the operator of the server to correct "
        "OCTET_OIDC_AUDIENCE, or the client at the provider"
    )


def _claims_of(token: str) -> dict[str, Any]:
    """Read what a token says, without any check: that is the server's to do. Empty for what is no JWT."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _http_to(url: str) -> httpx.Client:
    """Make a client of a provider. Raises SignInFailed unless it is reached by https, or within this machine."""
    if not _is_safe(url):
        raise SignInFailed(f"the identity provider {url} is not reached by https; nothing is sent there")
    return httpx.Client(timeout=_ANSWER_S, verify=trusted(), trust_env=not is_loopback(host_of(url)))


def _is_safe(url: str) -> bool:
    """Return True for https, and for http within this machine."""
    try:
        return url.startswith("https:") or is_loopback(host_of(url))
    except ValueError:
        return False


def _answer_of(
    http: httpx.Client, method: str, url: str, form: Mapping[str, str] | None = None, allowed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return an answer of the provider. allowed: errors that are answers too. Raises SignInFailed for any other."""
    try:
        response = http.request(method, url, data=form, headers={"Accept": "application/json"})
        document = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise SignInFailed(f"the identity provider at {url} does not answer: {error or type(error).__name__}") from error
    if not isinstance(document, dict):
        raise SignInFailed(f"the identity provider at {url} answered {response.status_code} with no object of JSON")
    if response.is_success or document.get("error") in allowed:
        return document
    words = document.get("error_description") or document.get("error") or f"status {response.status_code}"
    raise SignInFailed(f"the identity provider refuses it: {words}. Sign in again: octet login")
