"""Object stores: how a job names a place in one, which prefixes an operator allows, and where ranks keep what they have read.

A job names a URL, such as `s3://corpus/books`, and nothing else: the nodes of the operator have the credentials. The control
plane compares the URL with the allowed prefixes and connects to nothing; ranks compare it again and read it, or write an
export to it (`worker/data/stores.py`).
"""

import re
from pathlib import Path, PosixPath

from pydantic import Field, field_validator

from octet.api_schemas.base import Contract, SpecConflict

DEFAULT_CACHE_BYTES = 16 << 30
_URL = re.compile(r"[a-z][a-z0-9]{0,15}://[^\s\\?#%*@\[\]\x00-\x1f\x7f]+")
_FORM = "protocol://bucket/folder, without .., empty parts, spaces and the characters \\ ? # % * @ [ ]"


def is_url(place: str) -> bool:
    """Return True if a place is meant as a URL."""
    return "://" in place


def check_url(url: str) -> str:
    """Return a URL without a slash at its end. Raises ValueError, which says what is allowed, for any other form.

    A URL has no credentials, no escapes, no parts such as `..` that would lead out of a prefix, and names one protocol: fsspec
    would read `zip://a::s3://b` as two.
    """
    trimmed = url.rstrip("/")
    protocol, _, rest = trimmed.partition("://")
    parts = rest.removeprefix("/" if protocol == "file" else "").split("/")
    if not _URL.fullmatch(trimmed) or "::" in url or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{url} is not {_FORM}")
    return trimmed


class StorePath(PosixPath):
    """The place of a folder or file in an object store, as a path whose text is its URL. The file system has no such path."""

    __slots__ = ()

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}://{'/' if protocol == 'file' else ''}{rest}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} lies in an object store; open it with octet.worker.data.stores.StoreFiles")


def place_of(path: str) -> Path:
    """Return the place that a spec's path names: in an object store if it is a URL, in the file system otherwise."""
    return StorePath(path) if is_url(path) else Path(path)


class StoreAccess(Contract):
    """The URLs in object stores that ranks may read and may write exports to, and a cache. Without prefixes: none."""

    prefixes: tuple[str, ...] = Field(default=(), description="URLs; a job may name one of them or what lies below it")
    export_prefixes: tuple[str, ...] = Field(
        default=(), description="URLs; a job may write its exports to one of them or to what lies below it"
    )
    cache_folder: str | None = Field(default=None, description="folder for what was read; null keeps nothing")
    cache_bytes: int = Field(default=DEFAULT_CACHE_BYTES, ge=0, description="most bytes in the cache folder of a node")

    @field_validator("prefixes", "export_prefixes")
    @classmethod
    def _prefixes_are_urls(cls, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_url, prefixes))

    def require(self, url: str) -> None:
        """Raise SpecConflict unless a URL to read is an allowed prefix or lies below one."""
        _require_below(self.prefixes, url, "data.path", "OCTET_DATA_STORES", "a path: no object store is allowed here")

    def require_export(self, url: str) -> None:
        """Raise SpecConflict unless a URL to write exports to is an allowed prefix or lies below one."""
        none = "none: no object store is allowed here"
        _require_below(self.export_prefixes, url, "export.target", "OCTET_EXPORT_STORES", none)


def _require_below(prefixes: tuple[str, ...], url: str, field: str, setting: str, none: str) -> None:
    is_below = any(url == prefix or url.startswith(f"{prefix}/") for prefix in prefixes)
    if not is_below or ".." in url.split("/"):
        allowed = f"a place below {', '.join(prefixes)}" if prefixes else none
        raise SpecConflict(field, url, allowed, f"Change {field}, or have the operator add its prefix to {setting}.")


NO_STORES = StoreAccess()
