"""Canaries: secrets that are put in wherever a secret may be, and that must come out nowhere."""

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from octet.api_schemas import LogReport
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.db.tables import Base
from octet.service.processes.startup import checked_settings, database_of_one_machine
from octet.service.settings import Settings
from tests.service.conftest import POOLS, TestClient
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

KEY, OTHER_KEY = "canary-of-the-api-key-0123456789", "canary-of-the-other-key-9876543210"
PASSWORD = "canary-of-the-database-password"
WRONG_KEY = "canary-of-a-key-with-a-typing-error"


@pytest.mark.system
@ON_SQLITE
def test_no_answer_event_log_or_metric_has_a_key_or_a_token(
    world: World, tmp_path: Path, openapi_document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = tmp_path / "keys"
    keys.write_text(f"research:{OTHER_KEY}\n")
    config = Settings(data_dir=tmp_path, pools=POOLS, api_keys=(KEY,), api_keys_file=keys)
    app = create_app(config, database=world.database)
    app.openapi_schema = openapi_document
    job_id, rank = world.start()
    rank.send(step(1), LogReport(level="INFO", message="a line"))
    token = rank.order.token
    shown = []
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        paths = [path.replace("{job_id}", job_id) for path, does in openapi_document["paths"].items() if "get" in does]
        for key in (KEY, OTHER_KEY, WRONG_KEY, token):
            for path in paths:
                shown.append(client.get(path, headers={"Authorization": f"Bearer {key}"}))
            shown.append(client.post("/v1/jobs", json={}, headers={"Authorization": f"Bearer {key}"}))
            shown.append(client.post("/v1/jobs", json={}, headers={"Authorization": f"Basic {key}"}))
            reports = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
            shown.append(client.post(reports, json={}, headers={"Authorization": f"Bearer {key}"}))
        rank.succeed()
        world.dispatch()
        shown += [client.get(path, headers={"Authorization": f"Bearer {KEY}"}) for path in paths]
    assert {200, 401, 422} <= {answer.status_code for answer in shown}
    text = "".join(f"{answer.headers}{answer.text}" for answer in shown) + caplog.text + repr(config)
    for secret in (KEY, OTHER_KEY, WRONG_KEY, token):
        assert secret not in text


def test_no_message_has_the_database_s_password(tmp_path: Path) -> None:
    url = f"postgresql://octet:{PASSWORD}@127.0.0.1:1/octet"
    config = Settings(data_dir=tmp_path, pools=POOLS, database_url=url)
    with pytest.raises(RuntimeError) as raised:
        database_of_one_machine(config)
    assert "127.0.0.1:1" in str(raised.value)
    assert PASSWORD not in str(raised.value)
    assert PASSWORD not in repr(config)


def test_no_message_about_settings_has_a_secret(tmp_path: Path) -> None:
    wrong = {"data_dir": tmp_path, "api_keys": f"Bad Tenant:{KEY}", "database_url": f"postgresql://octet:{PASSWORD}@host/octet"}
    with pytest.raises(ValueError, match="tenant") as raised:
        checked_settings(wrong)
    assert KEY not in str(raised.value)
    assert PASSWORD not in str(raised.value)


@ON_SQLITE
def test_the_tokens_of_attempts_are_not_in_the_database(world: World) -> None:
    _, rank = world.start()
    with world.database.read() as session:
        connection = session.connection()
        stored = "".join(str(list(connection.execute(select(table)))) for table in Base.metadata.sorted_tables)
    assert rank.order.attempt_id in stored
    assert rank.order.token not in stored


def test_a_database_s_name_is_its_url_without_the_password() -> None:
    database = Database(f"postgresql://octet:{PASSWORD}@host:5432/octet")
    assert database.name == "postgresql://octet:***@host:5432/octet"
    database.close()
