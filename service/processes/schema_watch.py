"""Ends a process of cluster mode whose database a newer version of Octet has migrated, instead of failing in its requests.

Several versions can meet at one database only there: the data folder of `octet serve` has one server at a time.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, TimeoutError

from octet.service.db.engine import Database
from octet.service.db.migrate import NewerSchema

LOOK_S = 1.0

logger = logging.getLogger(__name__)


@contextmanager
def ending_on_newer_schema(database: Database, end: Callable[[], None], look_s: float = LOOK_S) -> Iterator[None]:
    """Look at the schema every `look_s`; call `end` when it is newer than this version, and raise NewerSchema afterwards.

    `end` has to make the block return; it is called in another thread. A database that is away is asked again.
    """
    stopping = threading.Event()
    found: list[NewerSchema] = []

    def watch() -> None:
        while not stopping.wait(look_s):
            try:
                database.check_schema()
            except NewerSchema as error:
                logger.critical("this process ends: %s", error)
                found.append(error)
                end()
                return
            except (DBAPIError, TimeoutError) as error:
                logger.debug("the schema could not be read: %s", error)

    thread = threading.Thread(target=watch, name="octet-schema", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
    if found:
        raise found[0]
