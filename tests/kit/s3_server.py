"""A server that speaks as much of S3 as reading takes: HEAD and GET of an object, in ranges, and ListObjectsV2 by folder.

Source of the answers: docs.aws.amazon.com/AmazonS3/latest/API, GetObject and ListObjectsV2. Signatures are not checked.
"""

import hashlib
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.kit.servers import running

DATE = "Sun, 22 Nov 2026 12:00:00 GMT"


class S3Server(ThreadingHTTPServer):
    """One bucket's objects by key. asked: ranges of bytes that were asked for. num_unsigned: requests
    without a signature."""

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket, self.objects, self.asked, self.num_unsigned = bucket, objects, list[str](), 0


class _Handler(BaseHTTPRequestHandler):
    server: S3Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.server.num_unsigned += "Signature=" not in self.headers.get("Authorization", "")
        if bucket == self.server.bucket and not key:
            self._answer(200, self._list(parse_qs(url.query)).encode(), {"Content-Type": "application/xml"})
            return
        content = self.server.objects.get(key) if bucket == self.server.bucket else None
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {"Content-Type": "application/xml"})
            return
        entity = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": DATE}
        if wanted := self.headers.get("Range"):
            self.server.asked.append(wanted)
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self._answer(206, part, entity | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"})
        else:
            self._answer(200, content, entity)

    do_HEAD = do_GET

    def _list(self, query: dict[str, list[str]]) -> str:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        entries, folders = [], set()
        for key, content in sorted(self.server.objects.items()):
            folder, mark, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if key.startswith(prefix) and mark:
                folders.add(f"{prefix}{folder}{mark}")
            elif key.startswith(prefix):
                entry = (
                    f"<Key>{escape(key)}</Key><Size>{len(content)}</Size><LastModified>2026-11-22T12:00:00.000Z</LastModified>"
                )
                entries.append(f'<Contents>{entry}<ETag>"{hashlib.md5(content).hexdigest()}"</ETag></Contents>')
        entries += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        head = f"<Name>{self.server.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>"
        return f"<ListBucketResult>{head}<IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def serving_s3(bucket: str, objects: dict[str, bytes]) -> AbstractContextManager[S3Server]:
    """Serve a bucket on loopback until the end of the block."""
    return running(S3Server(bucket, objects))
