"""The process behind `octet dispatcher`: runs jobs on a Ray cluster, in cluster mode.

Any number of them may run; one leads. It joins the Ray cluster as a node without resources. While the database is away
it waits; while the cluster is away it goes on, and jobs wait in the queue.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from octet.api_schemas import PoolConfig
from octet.service import store
from octet.service.cluster.ray.embedded import ray_environment, without_arrow
from octet.service.cluster.ray.node import RayNode
from octet.service.db.engine import Database
from octet.service.dispatcher import Dispatcher
from octet.service.dispatcher.loop import Loop
from octet.service.logs import LogFormat
from octet.service.processes.schema_watch import ending_on_newer_schema
from octet.service.processes.startup import (
    PRIVATE_UMASK,
    SHUTDOWN_S,
    cluster_settings,
    database_that_answers,
    end_by_exception,
    log_to_stderr,
)
from octet.service.settings import host_and_port
from octet.service.telemetry.loops import LoopHealth

_DEMAND_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


def dispatch(
    *,
    ray_address: str,
    ray_token_file: Path,
    database_url_file: Path | None = None,
    autoscale: bool = False,
    metrics_address: str = "",
    log_format: LogFormat | None = None,
) -> None:
    """Run jobs until SIGTERM or SIGINT; attempts on the cluster go on after that.

    `autoscale` tells Ray's autoscaler how many slots the queue wants; without it a pool without nodes never gets any.
    `metrics_address` is HOST:PORT, where Prometheus gets this process's metrics; empty for none.
    Raises ValueError for settings that cannot work, OSError for an address of metrics that is taken, and
    NewerSchema, a RuntimeError, before and while it runs, once a newer version of Octet has migrated the database.
    """
    settings = cluster_settings(database_url_file, log_format)
    if not settings.report_url:
        raise ValueError("set OCTET_REPORT_URL to the API's base URL as the workers reach it, for example http://api:8000")
    if not ray_token_file.is_file():
        raise ValueError(f"the Ray token file {str(ray_token_file)!r} does not exist; every node needs the same one")
    if not settings.data_roots:
        raise ValueError("set OCTET_DATA_ROOTS to the folders that jobs may read, as for the api; the ranks get them from here")
    node = RayNode(ray_address)
    end_by_exception()
    os.umask(PRIVATE_UMASK)
    log_to_stderr(settings.log_format)
    database = database_that_answers(settings)
    os.environ.update(ray_environment(ray_token_file))  # Ray reads it when it is imported
    without_arrow()
    from octet.service.cluster.ray.launcher import RayLauncher

    launcher = RayLauncher(node.ensure, settings.pools, warm_idle_s=settings.warm_idle_s)
    dispatcher = Dispatcher(database, launcher, settings)

    def request_slots() -> None:
        launcher.request_slots(slots_wanted(database, settings.pools))

    demand = Loop("demand", request_slots, _DEMAND_INTERVAL_S, dispatcher.health)
    schema_is_newer = threading.Event()
    with (
        ending_on_newer_schema(database, schema_is_newer.set),
        serving_metrics(metrics_address, dispatcher.health, lambda: dispatcher.leads, dispatcher.planning),
    ):
        dispatcher.start()
        if autoscale:
            demand.start()
        try:
            logger.info("the dispatcher runs attempts on the Ray cluster at %s", ray_address)
            schema_is_newer.wait()  # a signal ends the wait by SystemExit
        finally:
            demand.stop(SHUTDOWN_S)
            dispatcher.stop()
            launcher.close()
            node.stop()
            database.close()


def slots_wanted(database: Database, pools: Sequence[PoolConfig]) -> dict[str, int]:
    """Count the slots, by pool, that live attempts hold and queued jobs wait for; at most what the pool may have.

    Jobs that are still to be planned want none yet: no node is started for one that turns out not to fit it.
    """
    with database.read() as session:
        used = store.queue.slots_used(session)
        waiting = {
            pool.name: sum(
                job.workers for job in store.queue.head_of_queue(session, pool.name) if job.is_planned or not pool.plans_jobs
            )
            for pool in pools
        }
    return {pool.name: min(pool.slots, used.get(pool.name, 0) + waiting[pool.name]) for pool in pools}


@contextmanager
def serving_metrics(address: str, health: LoopHealth, leads: Callable[[], bool], *others: Collector) -> Iterator[int]:
    """Serve `GET /metrics` while the block runs, and yield the port. An empty address serves nothing, and yields 0.

    The metrics are those of this dispatcher alone; what all processes share is in the database, and every api serves it.

    address: HOST:PORT, an IPv6 host in brackets; port 0 takes a free one. Raises ValueError for any other form, OSError for
    an address that cannot be bound.
    """
    if not address:
        yield 0
        return
    host, port = host_and_port(address)
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
