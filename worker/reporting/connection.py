"""One HTTP connection to the control plane, kept open from one request to the next.

It is http.client's: a request takes the rank 0.5 ms of CPU between two steps, and with httpx 1.7 (medians of 60, caches cold).
"""

import http.client
import select
import socket
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
"""A certificate of https is checked against those that this machine trusts."""
FAILURES = (OSError, http.client.HTTPException)
"""The errors that `Post` raises: nobody answered, or not in HTTP."""


class Answer(NamedTuple):
    """A server's answer."""

    status: int
    content: bytes


Post = Callable[[bytes], Answer]
"""Sends a body of JSON and returns the answer. Raises one of `FAILURES` if there is none."""


class Connection:
    """Posts JSON to one URL. Only one thread uses it. No proxy is used."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        """token: sent as a bearer token. timeout_s: of each wait for the server."""
        parts = urlsplit(url)
        if parts.scheme not in CONNECTIONS or not parts.hostname:
            raise ValueError(f"cannot report to {url!r}; allowed: http://… and https://…. Change report_url.")
        self._target = parts.path or "/"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._http = CONNECTIONS[parts.scheme](parts.hostname, parts.port, timeout=timeout_s)

    def post(self, content: bytes) -> Answer:
        """Send a body, as `Post` has it. A connection that the server has closed meanwhile is opened again."""
        if self._http.sock is not None and _has_something_to_read(self._http.sock):
            self._http.close()
        try:
            self._http.request("POST", self._target, content, self._headers)
            response = self._http.getresponse()
            return Answer(response.status, response.read())
        except FAILURES:
            self._http.close()  # a later request must not find what is left of this one
            raise

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _has_something_to_read(connection: socket.socket) -> bool:
    """Return whether the server has sent something, such as the end, without a request."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
