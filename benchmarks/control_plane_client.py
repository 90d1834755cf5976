"""A load generator for the control plane: prepared bytes over many keep-alive connections, in one thread.

The machine's cores are shared by server and client, so a client that computes little leaves more to the server. Each load
says how much CPU the client took for each request.
"""

import selectors
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Make = Callable[[int], bytes]
"""Makes the next request of a connection, given the connection's number."""
MakeUntilNoneIsLeft = Callable[[int], bytes | None]
"""Make a request as `Make` does, or return None once the connection has sent all of its requests."""


@dataclass(frozen=True)
class Load:
    """Measurements of a load. Latencies are in ms; those of a paced load count from the moment when the request was due."""

    latencies_ms: list[float]
    elapsed_s: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.latencies_ms) / self.elapsed_s

    @property
    def client_cpu_ms(self) -> float:
        """CPU time of the client for each request, in ms."""
        return self.client_cpu_s / len(self.latencies_ms) * 1000

    def percentile_ms(self, percent: int) -> float:
        """Latency that this percentage of the requests does not exceed."""
        return statistics.quantiles(self.latencies_ms, n=100)[percent - 1]


class _Connection:
    """A keep-alive connection with at most one request under way."""

    def __init__(self, port: int, number: int, status: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = number
        self.due_at = 0.0
        self._expected = f"HTTP/1.1 {status} ".encode()
        self._received = b""

    def send(self, request: bytes, due_at: float) -> None:
        """Send a request that was due at a moment of `time.perf_counter`."""
        self.due_at, self._received = due_at, b""
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


def closed_loop(
    ports: Sequence[int], make: MakeUntilNoneIsLeft, num_connections: int, duration_s: float, *, status: int = 200
) -> Load:
    """Let each connection send a request as soon as it has its answer, until the time is over or it has no more.

    ports: of the servers, which get the connections in turns.
    """
    connections = [_Connection(ports[number % len(ports)], number, status) for number in range(num_connections)]
    latencies_ms: list[float] = []
    cpu_s, began = time.thread_time(), time.perf_counter()
    ends_at = began + duration_s
    with selectors.EpollSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            first = make(connection.number)
            assert first is not None, "each connection has at least one request"
            connection.send(first, time.perf_counter())
        num_open = num_connections
        while num_open:
            for key, _ in selector.select():
                connection = key.data
                if not connection.receive():
                    continue
                now = time.perf_counter()
                latencies_ms.append((now - connection.due_at) * 1000)
                request = make(connection.number) if now < ends_at else None
                if request is not None:
                    connection.send(request, now)
                else:
                    num_open -= 1
                    selector.unregister(connection.socket)
                    connection.socket.close()
    return Load(latencies_ms, time.perf_counter() - began, time.thread_time() - cpu_s)


def paced(port: int, make: Make, rate_per_s: float, duration_s: float, *, num_connections: int = 64, status: int = 200) -> Load:
    """Send requests at even moments, whether or not earlier ones are answered.

    A request that finds no free connection waits for one, and its latency counts from the moment when it was due.
    """
    free = [_Connection(port, number, status) for number in range(num_connections)]
    waiting: deque[float] = deque()
    latencies_ms: list[float] = []
    num_due, num_requests = 0, int(rate_per_s * duration_s)
    cpu_s, began = time.thread_time(), time.perf_counter()
    with selectors.EpollSelector() as selector:
        for connection in free:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while len(latencies_ms) < num_requests:
            next_at = began + num_due / rate_per_s
            for key, _ in selector.select(max(0.0, next_at - time.perf_counter()) if num_due < num_requests else None):
                if key.data.receive():
                    latencies_ms.append((time.perf_counter() - key.data.due_at) * 1000)
                    free.append(key.data)
            while num_due < num_requests and (due_at := began + num_due / rate_per_s) <= time.perf_counter():
                waiting.append(due_at)
                num_due += 1
            while waiting and free:
                connection = free.pop()
                connection.send(make(connection.number), waiting.popleft())
    for connection in free:
        connection.socket.close()
    return Load(latencies_ms, time.perf_counter() - began, time.thread_time() - cpu_s)
