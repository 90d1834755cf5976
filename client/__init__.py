"""The Python client of Octet: `Client` and the errors it raises. The `octet` command is `client.cli`."""

from client.api import Client
from client.errors import (
    ApiError,
    ConnectionFailed,
    DownloadFailed,
    JobFileError,
    OctetError,
    ServerFailed,
    SpecRefused,
    UnexpectedAnswer,
    WaitTimeout,
)

__all__ = [
    "ApiError",
    "Client",
    "ConnectionFailed",
    "DownloadFailed",
    "JobFileError",
    "OctetError",
    "ServerFailed",
    "SpecRefused",
    "UnexpectedAnswer",
    "WaitTimeout",
]
