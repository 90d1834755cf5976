"""Object stores for tests: fsspec's own in memory, and a server of files over HTTP on loopback that can be out of order."""

from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.data.stores import StoreAccess
from tests.kit.servers import running


def upload(path: Path, name: str) -> str:
    """Copy a file or folder to the store in memory; returns its URL."""
    url = f"memory://corpus/{name}"
    store = fsspec.filesystem("memory")
    if store.exists(f"/corpus/{name}"):
        store.rm(f"/corpus/{name}", recursive=True)
    store.put(str(path), f"/corpus/{name}", recursive=True)
    return url


def files_of(*prefixes: str, cache: Path | None = None, cache_bytes: int = 1 << 20) -> Files:
    """Any local file, and these prefixes of stores."""
    folder = None if cache is None else str(cache)
    return Files(ANY_FILE.roots, stores=StoreAccess(prefixes=prefixes, cache_folder=folder, cache_bytes=cache_bytes))


class Server(ThreadingHTTPServer):
    """Files by name. num_broken: how many of the next requests it answers with 503. asked: the ranges of bytes asked for."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.contents, self.num_broken, self.asked = contents, 0, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/corpus"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        content = self._answer()
        self.wfile.write(content)

    def _answer(self) -> bytes:
        content = self.server.contents.get(self.path.removeprefix("/corpus/"))
        if self.server.num_broken or content is None:
            self.server.num_broken = max(0, self.server.num_broken - 1)
            self.send_response(404 if content is None else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        wanted = self.headers.get("Range")
        if wanted:
            self.server.asked.append(wanted)
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        else:
            self.send_response(200)
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return content

    def log_message(self, *_: Any) -> None:
        pass


def serving(contents: dict[str, bytes]) -> AbstractContextManager[Server]:
    """Serve files until the end of the block."""
    return running(Server(contents))
