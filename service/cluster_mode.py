"""The processes of cluster mode: `octet api`, stateless, as many as you like; `octet dispatcher`, of which one leads.

Both are configured by OCTET_* variables (`service.settings`), share a PostgreSQL database, and wait for it as long as it is
away. The dispatcher joins the Ray cluster with a node that has no resources, and goes on without a cluster: jobs wait.
"""

import logging
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from sqlalchemy.exc import OperationalError

from api_schemas import PoolConfig
from service.app import create_app
from service.cluster.local_ray import ray_environment
from service.cluster.ray_node import RayNode
from service.db.engine import Database
from service.dispatcher import Dispatcher
from service.dispatcher.loop import Loop
from service.jobs import store_queue
from service.main import checked_settings, listening, log_to_stderr
from service.settings import Settings

_SHUTDOWN_S = 3
_DEMAND_INTERVAL_S = 5.0
_LONGEST_WAIT_S = 5.0

logger = logging.getLogger(__name__)


def api(*, database_url_file: Path | None = None) -> None:
    """Serve the API until SIGTERM or SIGINT. Raises ValueError for settings that cannot work, OSError for the port."""
    settings = cluster_settings(database_url_file)
    _end_by_exception()
    log_to_stderr()
    database = database_that_answers(settings)
    app = create_app(settings, database=database)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
    with listening(settings) as listener:
        logger.info("the API listens on http://%s:%d", settings.host, settings.port)
        uvicorn.Server(config).run(sockets=[listener])
    database.close()


def dispatch(*, ray_address: str, ray_token_file: Path, database_url_file: Path | None = None, autoscale: bool = False) -> None:
    """Move jobs along until SIGTERM or SIGINT; attempts go on without us. Raises ValueError for settings that cannot work.

    `autoscale`: tell Ray's autoscaler how many slots the queue wants, or a pool without nodes would never get any.
    """
    settings = cluster_settings(database_url_file)
    if not settings.report_url:
        raise ValueError("set OCTET_REPORT_URL to the API's base URL as the workers reach it, for example http://api:8000")
    if not ray_token_file.is_file():
        raise ValueError(f"the Ray token file {str(ray_token_file)!r} does not exist; every node needs the same one")
    node = RayNode(ray_address)
    _end_by_exception()
    log_to_stderr()
    database = database_that_answers(settings)
    os.environ.update(ray_environment(ray_token_file))
    from service.cluster.ray_launcher import RayLauncher

    launcher = RayLauncher(node.ensure, settings.pools)
    dispatcher = Dispatcher(database, launcher, settings)
    demand = Loop("demand", lambda: launcher.request_slots(slots_wanted(database, settings.pools)), _DEMAND_INTERVAL_S)
    dispatcher.start()
    if autoscale:
        demand.start()
    try:
        logger.info("the dispatcher runs attempts on the Ray cluster at %s", ray_address)
        while True:
            signal.pause()
    finally:
        demand.stop(_SHUTDOWN_S)
        dispatcher.stop()
        launcher.close()
        node.stop()
        database.close()


def slots_wanted(database: Database, pools: Sequence[PoolConfig]) -> dict[str, int]:
    """The slots that live attempts hold and queued jobs wait for, up to what each pool may have."""
    with database.read() as session:
        used = store_queue.slots_used(session)
        waiting = {pool.name: sum(job.workers for job in store_queue.head_of_queue(session, pool.name)) for pool in pools}
    return {pool.name: min(pool.slots, used.get(pool.name, 0) + waiting[pool.name]) for pool in pools}


def cluster_settings(database_url_file: Path | None) -> Settings:
    """Settings from the environment. Raises ValueError without a database that several processes can share."""
    url = _read(database_url_file) if database_url_file else None
    settings = checked_settings({"database_url": url} if url else {})
    if not settings.database_url.startswith("postgresql"):
        raise ValueError(
            "cluster mode needs a PostgreSQL database: set OCTET_DATABASE_URL=postgresql://…, or OCTET_DATABASE_URL_FILE to a "
            "file with that URL. For one machine without PostgreSQL use `octet serve`."
        )
    return settings


def database_that_answers(settings: Settings) -> Database:
    """The database, migrated; waits as long as it is away."""
    database = Database(settings.effective_database_url)
    wait_s = 0.5
    while True:
        try:
            database.migrate()
            return database
        except OperationalError as error:
            first_line = str(error.orig).splitlines()[0]
            logger.warning("the database does not answer; trying again in about %.1f s: %s", wait_s, first_line)
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"the file of the database URL, {str(path)!r}, cannot be read: {error.strerror}") from error


def _end_by_exception() -> None:
    """Let SIGTERM and SIGINT unwind the stack, whatever is waited for; uvicorn raises them anew once it has shut down."""

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
