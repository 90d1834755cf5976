"""Ports for the servers that tests start."""

import atexit
import socket


def free_port() -> int:
    """Return a TCP port of the loopback that is this process's until it ends.

    A socket stays bound to it, which the system counts when it chooses ports for others. Servers set SO_REUSEADDR, as this
    socket does, and can listen there nonetheless.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    atexit.register(holder.close)
    return int(holder.getsockname()[1])
