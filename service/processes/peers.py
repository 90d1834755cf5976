"""Find the user at the other end of a connection within this machine, by Linux's socket diagnostics (sock_diag(7)).

A server without keys serves the user who runs it and no other: whoever may submit a job runs code as that user. Nobody needs
a key for that, because the kernel knows whose socket is at the other end.
"""

import os
import socket
import struct
from functools import cache

_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NETLINK_SOCK_DIAG = 20, 1, 4
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2, up to its id: family, protocol, extensions, states
_ID = struct.Struct("!HH16s16s4x")  # inet_diag_sockid, up to its cookie: ports, addresses, any interface
_ANY_COOKIE, _ALL_STATES = b"\xff" * 8, 0xFFFFFFFF
_ANSWER = struct.Struct("=4x48x12xII")  # inet_diag_msg: the user and the inode come after expiry and queues

Address = tuple[str, int | None]


def user_of(client: Address, server: Address) -> int | None:
    """Return the id of the user whose process has the client's socket. client, server: of a TCP connection on this machine.

    None if nobody has it any more: the kernel says 0, which is root, for a socket that was closed. Raises OSError where the
    kernel has no such socket, or no such diagnostics.
    """
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    source, destination = (socket.inet_pton(family, host) for host, _ in (client, server))
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    request += _ID.pack(client[1] or 0, server[1] or 0, source, destination) + _ANY_COOKIE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError(-struct.unpack_from("=i", answer, _HEADER.size)[0], "the kernel does not show the socket")
    user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return user if inode else None


@cache
def shows_users() -> bool:
    """Return True if this machine's kernel can say whose sockets are connected. Linux nearly always can."""
    if not hasattr(socket, "AF_NETLINK"):
        return False
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        try:
            return user_of(client.getsockname(), client.getpeername()) == os.geteuid()
        except OSError:
            return False
