"""Bind an address. This module imports nothing heavy, so that a taken port is reported before anything else is loaded."""

import socket


def bound(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet. Raises OSError with what to change.

    option: where the user chooses the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With protocol 0 asyncio would not know that this is TCP and leave Nagle's algorithm on: 44 ms for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another with {option}.") from error
    return listener
