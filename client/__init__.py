"""The Python client of Octet: `Client` and the errors it raises. The `octet` command is `octet.client.cli`."""

if __name__ != "octet.client":
    raise ImportError("import octet.client, not client", name=__name__)


from octet.client.api import Client
from octet.client.errors import (
    AmbiguousJob,
    ApiError,
    ConnectionFailed,
    DownloadFailed,
    JobFileError,
    NoSuchJob,
    OctetError,
    ServerFailed,
    SpecRefused,
    UnexpectedAnswer,
    WaitTimeout,
)

__all__ = [
    "AmbiguousJob",
    "ApiError",
    "Client",
    "ConnectionFailed",
    "DownloadFailed",
    "JobFileError",
    "NoSuchJob",
    "OctetError",
    "ServerFailed",
    "SpecRefused",
    "UnexpectedAnswer",
    "WaitTimeout",
]
