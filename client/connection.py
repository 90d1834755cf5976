"""The connection to one server: it repeats requests, reads event streams and checks answers."""

import hashlib
import ipaddress
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import httpx
from pydantic import ValidationError

from octet.api_schemas import Contract, Problem
from octet.api_schemas.keys import local_key_file
from octet.api_schemas.problem import CONTENT_TYPE
from octet.client.errors import ApiError, ConnectionFailed, OctetError, UnexpectedAnswer

# Server-sent events, as the WHATWG HTML standard (section 9.2) defines the stream. Lines are split on bytes:
# `httpx.Response.iter_lines` would also split at U+2028 and its like, which JSON may hold.


@dataclass(frozen=True)
class ServerSentEvent:
    """One dispatched event. `id` is the last id that the stream has named so far, "" before the first."""

    event: str
    data: str
    id: str


def parse_sse(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield each event at its blank line. An event that the end of the stream cuts off is dropped, as it must be."""
    event, data, last_id = "", list[str](), ""
    for line in _lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent(event or "message", "\n".join(data), last_id)
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:  # a comment has an empty field name
            case "event":
                event = value
            case "data":
                data.append(value)
            case "id" if "\0" not in value:
                last_id = value


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    pending = b""
    for chunk in chunks:
        lines = (pending + chunk).splitlines(keepends=True)
        # The last line may go on in the next chunk; one that ends in \r too, for \n may follow.
        pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            yield line.rstrip(b"\r\n").decode("utf-8", "replace")


Shown = TypeVar("Shown", bound=Contract)

TRIED_AGAIN = (httpx.TransportError, httpx.HTTPStatusError)  # HTTPStatusError is raised for 408, 429 and 5xx only
_PASSING = {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS}
"""Refusals of one who was too slow, or of one who sent too much at once."""
_CHUNK_BYTES = 1 << 20
NDJSON = "application/x-ndjson"
LONGEST_SILENCE_S = 60.0  # a live event stream is never silent for longer: the server sends keep-alive comments


class _PresentToken(httpx.Auth):
    """Sends a token that changes while the client lives."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self._token()}"
        yield request


class Connection:
    """An httpx client with our rules: a lost connection, 408, 429 or 5xx is tried again, another 4xx raises ApiError."""

    def __init__(
        self, url: str, api_key: "str | Callable[[], str] | None", timeout_s: float, transport: httpx.BaseTransport | None
    ) -> None:
        """api_key: a key or a token, or what returns the present token before each request.

        Without one the key is sent that a server of this user on this machine has written for its clients, if it needs one.
        """
        self.url = url.rstrip("/")
        api_key = api_key or _key_of_local_server(url)
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if isinstance(api_key, str) and api_key else {},
            auth=_PresentToken(api_key) if callable(api_key) else None,
            timeout=timeout_s,
            transport=transport,
            trust_env=not is_loopback(host_of(url)),  # a proxy from the environment cannot reach this machine
            verify=trusted() if url.startswith("https:") else True,
        )

    def close(self) -> None:
        self._http.close()

    def answers(self, path: str) -> bool:
        """Ask once whether a GET is answered 200."""
        try:
            return self._http.get(path).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | Sequence[str]] | None = None,
        document: Any = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send until answered, for at most `patience_s`. timeout_s: of an answer that takes long.

        Raises ApiError, UnexpectedAnswer or ConnectionFailed."""
        delays = delays_s(patience_s)
        while True:
            try:
                timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
                request = self._http.request
                return _checked(request(method, path, params=params, json=document, headers=headers, timeout=timeout))
            except TRIED_AGAIN as error:
                self.pause(delays, error)

    def download(self, path: str, file: BinaryIO, *, patience_s: float) -> str:
        """Write an answer's content to a file, from its start, and return the SHA-256. Errors and patience as for `request`."""
        delays = delays_s(patience_s)
        while True:
            file.seek(0)
            file.truncate()
            digest = hashlib.sha256()
            try:
                with self._http.stream("GET", path) as response:
                    if response.is_error:
                        response.read()
                    for chunk in _checked(response).iter_bytes(_CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                return digest.hexdigest()
            except TRIED_AGAIN as error:
                self.pause(delays, error)

    def stream(self, path: str, last_id: str) -> Iterator[ServerSentEvent]:
        """Yield the events after `last_id` until the server ends the stream. A lost connection raises."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        timeout = httpx.Timeout(self._timeout_s, read=LONGEST_SILENCE_S)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
            yield from parse_sse(_checked(response).iter_bytes())

    def lines(self, path: str, document: Any, *, patience_s: float, timeout_s: float) -> Iterator[str]:
        """POST and yield the lines of the answer as they come, all again after a lost connection. Errors as for `request`.

        timeout_s: of the time without a line.
        """
        delays = delays_s(patience_s)
        headers, timeout = {"Accept": NDJSON}, httpx.Timeout(self._timeout_s, read=timeout_s)
        while True:
            try:
                with self._http.stream("POST", path, json=document, headers=headers, timeout=timeout) as response:
                    if response.is_error:
                        response.read()
                    yield from _checked(response).iter_lines()
                return
            except TRIED_AGAIN as error:
                self.pause(delays, error)

    def pause(self, delays: Iterator[float], error: Exception) -> None:
        """Sleep before the next try, or raise the error if no try is left."""
        delay_s = next(delays, None)
        if delay_s is not None:
            time.sleep(max(delay_s, _retry_after_s(error)))
        elif isinstance(error, httpx.HTTPStatusError):
            raise _refusal(error.response) from error
        else:
            raise ConnectionFailed(self.url, str(error) or type(error).__name__) from error


def trusted() -> ssl.SSLContext:
    """Make a context that trusts the authorities of the file OCTET_CA_FILE, or the system's. Raises OctetError for the file."""
    ca_file = os.environ.get("OCTET_CA_FILE") or None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "it has no PEM certificate"
        raise OctetError(f"OCTET_CA_FILE is {ca_file!r}, which cannot be used: {reason}. Name a PEM file.") from error


def delays_s(patience_s: float) -> Iterator[float]:
    """Yield pauses of 0.1, 0.2, 0.4, … up to 2 s, each shortened at random by up to half; together `patience_s`."""
    longest_s = 0.1
    while patience_s > 1e-3:
        delay_s = min(longest_s * random.uniform(0.5, 1.0), patience_s)
        patience_s -= delay_s
        longest_s = min(2 * longest_s, 2.0)
        yield delay_s


def read(model: type[Shown], response: httpx.Response) -> Shown:
    """Read the answer as a contract; fields of a newer server are dropped."""
    try:
        return model.read_stored(response.json())
    except (ValidationError, ValueError, TypeError) as error:
        raise _unexpected(response) from error


def read_message(model: type[Shown], message: ServerSentEvent) -> Shown:
    """Read the data of a server-sent event as a contract."""
    return read_text(model, message.data)


def read_text(model: type[Shown], text: str) -> Shown:
    """Read an event's data, or a line, as a contract."""
    try:
        return model.read_stored(json.loads(text))
    except (ValidationError, ValueError, TypeError) as error:
        raise UnexpectedAnswer(f"the event stream sent data that is no {model.__name__}: {text[:200]!r}.") from error


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_server_error or response.status_code in _PASSING:
        response.raise_for_status()
    if not response.is_success:
        raise _refusal(response)
    return response


def _retry_after_s(error: Exception) -> float:
    """Return the seconds after which a 429 may be sent again; 0 for every other error."""
    if not isinstance(error, httpx.HTTPStatusError) or error.response.status_code != httpx.codes.TOO_MANY_REQUESTS:
        return 0.0
    given = error.response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else 0.0


def _refusal(response: httpx.Response) -> OctetError:
    if response.headers.get("content-type", "").startswith(CONTENT_TYPE):
        return ApiError(read(Problem, response))
    return _unexpected(response)


def _unexpected(response: httpx.Response) -> UnexpectedAnswer:
    request, start = response.request, response.text[:200]
    return UnexpectedAnswer(
        f"{request.method} {request.url} answered {response.status_code} with something that no Octet server of this "
        f"version sends: {start!r}. Check that the URL is right and that client and server are of one version."
    )


def host_of(url: str) -> str:
    """Return the host of a server's URL. Raises ValueError for what is none."""
    allowed = "allowed: http(s)://host[:port]. Change --url or OCTET_URL."
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a URL: {url!r} ({error}); {allowed}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"not the URL of a server: {url!r}; {allowed}")
    return parsed.host


def _key_of_local_server(url: str) -> str | None:
    """Return the key that `octet serve` on this machine has written for its user, if it needs one."""
    if not is_loopback(host_of(url)):
        return None
    parsed = httpx.URL(url)
    with suppress(OSError):
        return local_key_file(parsed.port or (443 if parsed.scheme == "https" else 80)).read_text(encoding="utf-8")
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
