"""Serve a rank's metrics to Prometheus on a port of its own, and report the address to the control plane.

The server listens only on the address from which the rank reaches the control plane. Prometheus runs next to the control
plane and reaches the rank by that address; on a single machine it is the loopback. A scrape costs the training loop only
processor time, a part of what `benchmarks/job_overhead.py` measures.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from octet.api_schemas import EventReport, ExporterReport, ReportBody
from octet.worker.metrics.table import FAMILIES, Family, Metrics

MAX_SERIES = 1 + sum(family.most_series for family in FAMILIES)  # and the counter of dropped series
DROPPED = "octet_exporter_dropped_series_total"
_POLL_S = 0.5
"""Between looks for the end where a socket that is shut down wakes nobody: not on Linux."""


class MetricsCollector(Collector):
    """Converts metrics to Prometheus' form, at most `max_series`. A family that does not fit is left out and counted."""

    def __init__(self, metrics: Metrics, max_series: int = MAX_SERIES) -> None:
        self._metrics = metrics
        self._max_series = max_series
        self._num_dropped = 0
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        num_left = self._max_series - 1  # for the counter of dropped series
        num_dropped = 0
        for metric in self._families():
            if len(metric.samples) > num_left:
                num_dropped += len(metric.samples)
                continue
            num_left -= len(metric.samples)
            yield metric
        with self._lock:
            self._num_dropped += num_dropped
            yield CounterMetricFamily(DROPPED, "series left out of answers because of the budget", value=self._num_dropped)

    def _families(self) -> Iterable[Metric]:
        found: dict[Family, Metric] = {}
        for family, labels, value in self._metrics.read():
            if family not in found:
                make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                found[family] = make(family.name, family.help, labels=family.labels)
            found[family].add_metric(labels, value)
        return found.values()


class Exporter:
    """A context manager: inside it, `http://{address}/metrics` answers. Raises OSError if it cannot listen on `host`."""

    def __init__(self, metrics: Metrics, host: str, port: int = 0) -> None:
        registry = CollectorRegistry()
        registry.register(MetricsCollector(metrics))
        server_class = _ServerV6 if ":" in host else _Server
        self._server = make_server(host, port, make_wsgi_app(registry), server_class, handler_class=_QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="octet-exporter", daemon=True)
        self.address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def exported(metrics: Metrics, send: Callable[[ReportBody], None], report_url: str) -> Iterator[None]:
    """Serve the metrics and report the address by `send`. If serving fails, send an event and let the rank train."""
    try:
        exporter = Exporter(metrics, local_address_towards(report_url))
    except OSError as error:
        send(EventReport(type="exporter.failed", message=f"this rank's metrics are not served: {error}"))
        yield
        return
    with exporter:
        send(ExporterReport(address=exporter.address))
        yield


def local_address_towards(url: str) -> str:
    """Return this machine's address on the route to `url`, without sending anything. Raises OSError without a route."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, protocol, _, peer = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


class _Server(ThreadingWSGIServer):
    def server_bind(self) -> None:
        """Bind as the parents do, but do not look up this machine's name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not worth a line in the log."""
