"""A load generator for the control plane: prepared bytes over many keep-alive connections, in one thread.

The machine's cores are shared by server and client, so a client that computes little leaves more to the server. Each load
says how much CPU the client took for each request.
"""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Make = Callable[[int], bytes]
"""Makes the next request of a connection, given the connection's number."""


@dataclass(frozen=True)
class Load:
    """Measurements of a load."""

    num_answers: int
    elapsed_s: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return self.num_answers / self.elapsed_s

    @property
    def client_cpu_ms(self) -> float:
        """CPU time of the client for each request, in ms."""
        return self.client_cpu_s / self.num_answers * 1000


class _Connection:
    """A keep-alive connection with at most one request under way."""

    def __init__(self, port: int, number: int, status: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = number
        self._expected = f"HTTP/1.1 {status} ".encode()
        self._received = b""

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._received = b""
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Read what has arrived; return True if the answer is whole. Raises RuntimeError for another status."""
        chunk = self.socket.recv(1 << 16)
        self._received = received = self._received + chunk if self._received else chunk
        end = received.find(b"\r\n\r\n")
        if end < 0 and chunk:
            return False
        if not received.startswith(self._expected):
            raise RuntimeError(f"got {received[:2000].decode()!r}; expected {self._expected.decode()!r}")
        begin = received.find(b"content-length: ", 0, end) + len(b"content-length: ")
        return len(received) >= end + 4 + int(received[begin : received.find(b"\r", begin)])


def closed_loop(ports: Sequence[int], make: Make, num_connections: int, duration_s: float, *, status: int = 200) -> Load:
    """Let each connection send a request as soon as it has its answer, until the time is over.

    ports: of the servers, which get the connections in turns.
    """
    connections = [_Connection(ports[number % len(ports)], number, status) for number in range(num_connections)]
    num_answers, num_open = 0, num_connections
    cpu_s, began = time.thread_time(), time.perf_counter()
    ends_at = began + duration_s
    with selectors.EpollSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(make(connection.number))
        while num_open:
            for key, _ in selector.select():
                connection = key.data
                if not connection.receive():
                    continue
                num_answers += 1
                if time.perf_counter() < ends_at:
                    connection.send(make(connection.number))
                else:
                    num_open -= 1
                    selector.unregister(connection.socket)
                    connection.socket.close()
    return Load(num_answers, time.perf_counter() - began, time.thread_time() - cpu_s)
