"""A server that speaks as much of S3 as Octet's reading and writing take. Signatures are not checked.

HEAD and GET of an object, in ranges; ListObjectsV2 by folder; PUT in one piece or in parts; DELETE. Source of the answers:
docs.aws.amazon.com/AmazonS3/latest/API: GetObject, ListObjectsV2, PutObject, CreateMultipartUpload, UploadPart,
CompleteMultipartUpload, DeleteObject.
"""

import hashlib
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.kit.servers import running

DATE = "Sun, 22 Nov 2026 12:00:00 GMT"


class S3Server(ThreadingHTTPServer):
    """One bucket's objects by key.

    asked: ranges of bytes that were asked for. written: keys in the order in which they were complete. num_writes_left: how
    many more it takes before it answers 503; None: all. num_unsigned: requests without a signature.
    """

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket, self.objects, self.asked, self.num_unsigned = bucket, objects, list[str](), 0
        self.written, self.num_writes_left = list[str](), None
        self.parts = dict[str, dict[int, bytes]]()

    written: list[str]
    num_writes_left: int | None


class _Handler(BaseHTTPRequestHandler):
    server: S3Server
    protocol_version = "HTTP/1.1"  # clients wait for "100 Continue" before they send a body

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

    def do_PUT(self) -> None:
        url, body = urlsplit(self.path), self._body()
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query)
        if bucket != self.server.bucket:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>", {"Content-Type": "application/xml"})
        elif self.server.num_writes_left == 0:
            self._answer(503, b"<Error><Code>ServiceUnavailable</Code></Error>", {"Content-Type": "application/xml"})
        else:
            if self.server.num_writes_left is not None:
                self.server.num_writes_left -= 1
            if "partNumber" in query:
                self.server.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            else:
                self._put(key, body)
            self._answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def do_POST(self) -> None:
        url, _ = urlsplit(self.path), self._body()
        key, query = unquote(url.path).lstrip("/").partition("/")[2], parse_qs(url.query, keep_blank_values=True)
        if "uploads" in query:
            upload = str(len(self.server.parts))
            self.server.parts[upload] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        else:
            self._put(key, b"".join(content for _, content in sorted(self.server.parts.pop(query["uploadId"][0]).items())))
            answer = f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key></CompleteMultipartUploadResult>"
        self._answer(200, answer.encode(), {"Content-Type": "application/xml"})

    def do_DELETE(self) -> None:
        self.server.objects.pop(unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2], None)
        self._answer(204, b"", {})

    def _body(self) -> bytes:
        self.server.num_unsigned += "Signature=" not in self.headers.get("Authorization", "")
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _put(self, key: str, content: bytes) -> None:
        self.server.objects[key] = content
        self.server.written.append(key)

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
        for name, value in (headers | {"Content-Length": str(len(content)), "Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def serving_s3(bucket: str, objects: dict[str, bytes]) -> AbstractContextManager[S3Server]:
    """Serve a bucket on loopback until the end of the block."""
    return running(S3Server(bucket, objects))
