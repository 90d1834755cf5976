"""A database file that is removed or replaced under a running server is noticed with the next request."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from octet.service.db.engine import Database
from tests.service.test_jobs_api import problem_of
from tests.service.world import World

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def path_of(database: Database) -> Path:
    assert database.path is not None
    return database.path


@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_nothing_is_accepted_into_a_file_that_is_gone(
    client: TestClient, world: World, spec_document: dict[str, Any], is_replaced: bool
) -> None:
    assert client.post("/v1/jobs", json=spec_document).status_code == 201
    assert client.get("/readyz").status_code == 200
    path = path_of(world.database)
    aside = path.with_suffix(".aside")
    path.rename(aside)
    if is_replaced:
        shutil.copy(aside, path)
    for answer in (client.get("/readyz"), client.post("/v1/jobs", json=spec_document), client.get("/v1/jobs")):
        assert "removed or replaced" in problem_of(answer, 503).detail
    assert client.get("/healthz").status_code == 200
    assert path.exists() is is_replaced, "no empty database takes its place"
    path.unlink(missing_ok=True)
    aside.rename(path)
    assert client.get("/readyz").status_code == 200
    assert len(client.get("/v1/jobs").json()["data"]) == 1


def test_a_transaction_of_the_dispatcher_is_refused_too(world: World) -> None:
    world.database.migrate()
    path_of(world.database).rename(path_of(world.database).with_suffix(".aside"))
    with pytest.raises(OperationalError, match="removed or replaced"):
        world.dispatch()
