"""Fixtures of the control plane's tests: both databases, a clock to turn, a fake cluster, a client without a network."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from octet.api_schemas import JobSpec, PoolConfig
from octet.service.app import create_app
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.bulk import run
from octet.service.db.engine import Database
from octet.service.db.tables import Base, TallyRow
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.service.databases import DATABASES
from tests.service.postgres_server import server_or_skip
from tests.service.world import TurnedClock, World

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette warns that it prefers httpx2
    from fastapi.testclient import TestClient

POOLS = (
    PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=2),
    PoolConfig(name="h100", node_label=("octet-pool", "h100"), slots=8, accelerator="cuda"),
)


@pytest.fixture(scope="session")
def fast_dir() -> Iterator[Path]:
    """A folder in memory if possible. SQLite waits for the disk at each commit, and tests need not."""
    folder = Path(tempfile.mkdtemp(prefix="octet-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with server_or_skip() as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_template(fast_dir: Path) -> Path:
    path = fast_dir / "template.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


@pytest.fixture
def sqlite_file(sqlite_template: Path, tmp_path: Path) -> Path:
    """Return an empty database for a test that writes to it and needs no other kind."""
    return Path(shutil.copy(sqlite_template, tmp_path / "copy.db"))


@pytest.fixture(scope="session")
def postgres_database(postgres_url: str) -> Iterator[Database]:
    """A database that the session shares. Each test starts with it empty."""
    database = Database(postgres_url)
    database.migrate()
    yield database
    database.close()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty, migrated database of each kind."""
    if request.param == "postgres":
        shared: Database = request.getfixturevalue("postgres_database")
        with shared.write() as session:
            empty(session)
        yield request.getfixturevalue("postgres_url")
        return
    folder = Path(tempfile.mkdtemp(dir=request.getfixturevalue("fast_dir")))
    shutil.copy(request.getfixturevalue("sqlite_template"), folder / "octet.db")
    yield f"sqlite:///{folder / 'octet.db'}"
    shutil.rmtree(folder)


TABLES = [table.name for table in reversed(Base.metadata.sorted_tables) if table.name != TallyRow.__tablename__]
"""All tables in an order in which they can be emptied, but for the one that triggers empty."""


def empty(session: Session) -> None:
    for table in TABLES:
        run(session.connection(), f"DELETE FROM {table}")
    run(session.connection(), "DELETE FROM tallies WHERE subject = 'deleted_attempt'")  # the triggers keep the others


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def database(database_url: str, clock: TurnedClock) -> Iterator[Database]:
    database = Database(database_url, clock)
    yield database
    database.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", pools=POOLS, data_check_timeout_s=LONG_S)


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher(POOLS)


@pytest.fixture
def world(
    database: Database,
    clock: TurnedClock,
    settings: Settings,
    launcher: FakeLauncher,
    spec_document: dict[str, Any],
) -> World:
    return World(database, clock, settings, launcher, JobSpec.model_validate(spec_document))


@pytest.fixture(scope="session")
def openapi_document(fast_dir: Path) -> dict[str, Any]:
    database = Database(f"sqlite:///{fast_dir}/none.db")
    document = create_app(Settings(data_dir=fast_dir / "none"), database=database).openapi()
    database.close()
    return document


@pytest.fixture(scope="session")
def check_processes() -> Iterator[CheckProcesses]:
    """Processes that check files for the apps of a session: each takes a third of a second to start."""
    processes = CheckProcesses()
    yield processes
    processes.close()


@pytest.fixture
def client(world: World, check_processes: CheckProcesses, openapi_document: dict[str, Any]) -> Iterator[TestClient]:
    """A client of an app over the world's database. A bug is answered with 500, as a user would see it."""
    app = create_app(world.settings, database=world.database, checks=check_processes)
    app.openapi_schema = openapi_document  # the same for every app, and slow to make
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client
