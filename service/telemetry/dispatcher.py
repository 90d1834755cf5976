"""The metrics of a dispatcher in cluster mode, over an HTTP port of its own: the failures of its loops, and if it leads.

What all processes share is in the database, and every api serves it. `octet serve` serves the loops with everything else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from octet.service.telemetry.loops import LoopHealth


@contextmanager
def serving_metrics(address: str, health: LoopHealth, leads: Callable[[], bool], *others: Collector) -> Iterator[int]:
    """Serve `GET /metrics` while the block runs, and yield the port. An empty address serves nothing, and yields 0.

    address: HOST:PORT, an IPv6 host in brackets; port 0 takes a free one. Raises ValueError for any other form, OSError for
    an address that cannot be bound.
    """
    if not address:
        yield 0
        return
    host, port = _host_and_port(address)
    registry = CollectorRegistry()
    for collector in (health, *others):
        registry.register(collector)
    ProcessCollector(registry=registry)
    leading = Gauge("octet_dispatcher_is_leader", "1 while this dispatcher leads", registry=registry)
    leading.set_function(lambda: float(leads()))
    Gauge("octet_build_info", "1; the version that runs", ["version"], registry=registry).labels(version("octet-fp8")).set(1)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {address}: {error.strerror}. Choose another --metrics-address.") from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"the address of the metrics is HOST:PORT, for example 127.0.0.1:9464; got {address!r}")
    return host.strip("[]"), int(port)
