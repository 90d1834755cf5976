"""The messages between template, forked process and rank's actor: JSON objects over a Unix socket, each after its length."""

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")


def send(connection: socket.socket, document: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send an object, and duplicates of open files with it. Raises OSError if the other side is gone."""
    body = json.dumps(document).encode()
    socket.send_fds(connection, [_HEAD.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive(connection: socket.socket, num_descriptors: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Receive an object and the open files that came with it; None if the other side is gone. Raises TimeoutError."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, num_descriptors)
        head += _exactly(connection, _HEAD.size - len(head)) if head else b""
        if not head:
            return None
        document: dict[str, Any] = json.loads(_exactly(connection, _HEAD.unpack(head)[0]))
    except (ConnectionError, EOFError):
        return None
    return document, descriptors


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other side: of whoever called `listen` or `connect` there. Linux only."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(min(1 << 20, num_bytes - len(parts)))
        if not part:
            raise EOFError("the other side closed the connection in the middle of a message")
        parts += part
    return bytes(parts)
