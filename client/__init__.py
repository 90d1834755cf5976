"""The Python client of Octet: `Client` and the errors it raises. The `octet` command is `octet.client.cli`."""

if __name__ != "octet.client":
    raise ImportError("import octet.client, not client", name=__name__)


from octet.client.api import Client
from octet.client.errors import (
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
