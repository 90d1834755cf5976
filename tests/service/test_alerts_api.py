"""Alerts of `GET /v1/alerts`: each fires after its time and not before, and is the rule of the same name for Prometheus."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from octet.api_schemas import CheckpointReport
from octet.api_schemas.catalog import AlertName
from octet.service.app import create_app
from octet.service.jobs import alerts
from octet.service.jobs.alerts import RULES
from octet.service.settings import Settings
from octet.service.telemetry.loops import WAITING_S
from tests.observability.test_rules import ALERTS
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World

Document = dict[str, Any]
SECONDS = {"s": 1, "m": 60}


def firing(client: TestClient, **headers: str) -> dict[str, Document]:
    """Return the alerts by name, of several of one name the last."""
    answer = client.get("/v1/alerts", headers=headers)
    assert answer.status_code == 200, answer.text
    return {alert["name"]: alert for alert in answer.json()["data"]}


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def fires_after(client: TestClient, world: World, name: str, seconds: float, **headers: str) -> Document:
    """Turn the clock until an alert has to fire: a second before it must not. Return the alert."""
    world.clock.turn(seconds - 1)
    assert name not in firing(client, **headers)
    world.clock.turn(2)
    found = firing(client, **headers)[name]
    assert found["runbook"] == f"docs/operations.md#{name.lower()}"
    return found


@ON_SQLITE
def test_nothing_fires_while_all_is_well(client: TestClient, world: World) -> None:
    _, rank = world.start(steps=100)
    rank.train(1, 2)
    world.submit(workers=2)
    page = client.get("/v1/alerts").json()
    assert (page["data"], page["has_more"]) == ([], False)


def test_no_leader(client: TestClient, world: World) -> None:
    world.context.give_up()
    left_at = world.clock.now()
    found = fires_after(client, world, "OctetNoLeader", 60)
    assert (found["severity"], moment(found["since"])) == ("critical", left_at)
    world.context = world.new_dispatcher()
    assert firing(client) == {}


@ON_SQLITE
def test_a_service_that_nobody_ever_led_has_no_leader(client_without_leader: TestClient) -> None:
    assert firing(client_without_leader)["OctetNoLeader"]["since"] is None


@pytest.fixture
def client_without_leader(settings: Settings, database: Any) -> Iterator[TestClient]:
    app = create_app(settings, database=database)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@ON_SQLITE
def test_a_loop_that_stalls(client: TestClient, world: World) -> None:
    world.dispatch()
    with world.database.read() as session:
        until = alerts.store.queue.loops_until(session)
    assert until == {}, "the steps of this world run in no loop"
    with world.database.write() as session:
        alerts.store.queue.note_loops(session, "here", "token", {"watch": WAITING_S, "launch": 9999}, world.clock.now())
    with world.database.read() as session:
        left_s = (alerts.store.queue.loops_until(session)["watch"] - world.clock.now()).total_seconds()
    found = fires_after(client, world, "OctetLoopStalled", left_s + 30)
    assert (found["severity"], found["loop"]) == ("critical", "watch")
    assert "watch makes no progress" in found["summary"]


@ON_SQLITE
def test_a_job_that_is_stuck_in_the_queue(client: TestClient, world: World) -> None:
    world.submit(workers=2)
    world.dispatch()
    waits = world.submit(name="waits", workers=2)
    found = fires_after(client, world, "OctetJobStuckInQueue", 1800 + 300)
    assert (found["severity"], found["pool"], found["job_id"]) == ("warning", "cpu", waits)
    assert found["summary"] == "Job waits of pool cpu has waited for more than 30 minutes"
    assert moment(found["since"]) == moment(client.get(f"/v1/jobs/{waits}").json()["created_at"])


@ON_SQLITE
def test_a_job_without_heartbeat(client: TestClient, world: World) -> None:
    """It is a warning: its lease decides, and its runbook asks nobody to do anything."""
    lost, rank = world.start(name="lost")
    rank.train(1)
    reported_at = world.clock.now()
    found = fires_after(client, world, "OctetJobNoHeartbeat", 30 + 15)
    assert (found["severity"], found["job_id"], found["job_name"]) == ("warning", lost, "lost")
    assert moment(found["since"]) == reported_at
    rank.train(2)
    assert "OctetJobNoHeartbeat" not in firing(client)
    rank.succeed()
    world.clock.turn(3600)
    assert "OctetJobNoHeartbeat" not in firing(client)


@ON_SQLITE
def test_a_checkpoint_that_is_too_old(client: TestClient, world: World) -> None:
    """A checkpoint every 100 steps of half a second: after three times 50 s, five minutes and one."""
    training = world.spec.training.model_dump(mode="json") | {"steps": 10_000, "checkpoint_every": 100}
    _, rank = world.start(name="kept", training=training)
    rank.train(1)
    lasts = 300 + 3 * 50 + 60
    assert firing_after(client, world, rank, lasts - 1) is None
    found = firing_after(client, world, rank, 2)
    assert found is not None
    assert (found["severity"], found["job_name"]) == ("warning", "kept")
    rank.send(CheckpointReport(step=1, name="step_0000000001", num_bytes=10, sha256="a" * 64, loss=2.0))
    saved_at = world.clock.now()
    assert firing_after(client, world, rank, lasts - 1) is None
    found = firing_after(client, world, rank, 2)
    assert found is not None
    assert moment(found["since"]) == saved_at


@ON_SQLITE
def test_a_job_without_checkpoints_needs_none(client: TestClient, world: World) -> None:
    training = world.spec.training.model_dump(mode="json") | {"checkpoint_every": 0, "checkpoint_every_minutes": 0}
    _, rank = world.start(training=training)
    rank.train(1)
    assert firing_after(client, world, rank, 86_400) is None


def firing_after(client: TestClient, world: World, rank: Rank, seconds: float) -> Document | None:
    """Let time pass, at whose end the rank reports, and look for the alert about its checkpoint."""
    world.clock.turn(seconds)
    rank.send()
    return firing(client).get("OctetCheckpointTooOld")


@ON_SQLITE
def test_two_leases_that_run_out_are_no_storm(client: TestClient, world: World) -> None:
    for _ in range(2):
        world.start()[1].train(1)
    world.clock.turn(world.settings.lease_s + 31)
    assert "OctetLeaseStorm" not in firing(client)


@ON_SQLITE
def test_a_storm_of_leases(client: TestClient, world: World) -> None:
    """Overdue leases count until their attempts have ended, and ended attempts for ten minutes."""
    ranks = [world.start(pool=pool)[1] for pool in ("cpu", "cpu", "h100")]
    for rank in ranks:
        rank.train(1)
    found = fires_after(client, world, "OctetLeaseStorm", world.settings.lease_s + 30)
    assert (found["severity"], found["summary"]) == (
        "critical",
        "3 attempts lost touch with the control plane and have not ended yet",
    )
    world.turn(2 * world.settings.lease_s)  # a dispatcher that has just taken over waits before it ends attempts
    world.dispatch()
    assert "OctetLeaseStorm" not in firing(client), "the attempts ended this moment"
    found = fires_after(client, world, "OctetLeaseStorm", 30)
    assert found["summary"] == "3 attempts lost touch with the control plane in 10 minutes"
    world.turn(600)
    assert "OctetLeaseStorm" not in firing(client)


def test_alerts_of_jobs_are_the_tenants_own(client: TestClient, world: World, tmp_path: Path) -> None:
    """The alert about the queue names the tenant's own job, though another's waits longer; the leader is everybody's."""
    keys = {name: f"the api key of {name} here" for name in ("one", "two", "")}
    lines = tuple(f"{name}:{key}" if name else key for name, key in keys.items())
    app = create_app(Settings(data_dir=tmp_path, pools=world.settings.pools, api_keys=lines), database=world.database)
    document = world.spec.model_dump(mode="json")
    with TestClient(app, base_url="http://127.0.0.1:8000") as keyed:
        headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        for tenant, name in (("one", "runs"), ("two", "waits-longest"), ("one", "waits")):
            body = document | {"name": name, "resources": {"pool": "cpu", "workers": 2}}
            body["training"] = document["training"] | {"global_batch_size": 8}
            assert keyed.post("/v1/jobs", json=body, headers=headers[tenant]).status_code == 201
            world.dispatch()
            world.clock.turn(1)
        world.rank_of(next(job.id for job in world.all_jobs() if job.name == "runs")).begin()
        world.clock.turn(3600)
        seen = {
            tenant: {name: alert["job_name"] for name, alert in firing(keyed, **each).items()}
            for tenant, each in headers.items()
        }
    of_one = {"OctetNoLeader": None, "OctetJobStuckInQueue": "waits", "OctetJobNoHeartbeat": "runs"}
    of_two = {"OctetNoLeader": None, "OctetJobStuckInQueue": "waits-longest"}
    assert seen == {"one": of_one, "two": of_two, "": of_one | {"OctetJobStuckInQueue": "waits-longest"}}


@ON_SQLITE
def test_no_more_are_listed_than_asked_for_and_critical_ones_come_first(client: TestClient, world: World) -> None:
    for _ in range(2):
        world.start()[1].train(1)
    world.clock.turn(46)
    page = client.get("/v1/alerts?limit=1").json()
    assert ([alert["name"] for alert in page["data"]], page["has_more"]) == (["OctetJobNoHeartbeat"], True)
    world.clock.turn(600)
    severities = [alert["severity"] for alert in client.get("/v1/alerts").json()["data"]]
    assert severities == sorted(severities)
    assert set(severities) == {"critical", "warning"}


THRESHOLDS: dict[AlertName, str] = {
    "OctetNoLeader": r"octet_dispatcher_leads\) == 0$",
    "OctetLoopStalled": r"octet_dispatcher_loop_stalled\) == 1$",
    "OctetLeaseStorm": (
        rf'reason="lease_expired"}}\[{alerts.LOST_WITHIN_S // 60}m\]\)\) >= {alerts.MANY_LOST}\s+'
        rf'or max\(octet_attempt_leases{{state="overdue"}}\) >= {alerts.MANY_LOST}$'
    ),
    "OctetJobStuckInQueue": rf"octet_queue_oldest_wait_seconds\) > {alerts.WAITED_S}$",
    "OctetJobNoHeartbeat": rf"octet_job_last_report_timestamp_seconds\) > {alerts.SILENT_S}$",
    "OctetCheckpointTooOld": rf"> {alerts.UNSAVED_S} \+ {alerts.UNSAVED_INTERVALS} \* max by .*checkpoint_interval_seconds\)\n",
}


@pytest.mark.parametrize("name", get_args(AlertName))
def test_an_alert_is_the_rule_for_prometheus(name: AlertName) -> None:
    (rule,) = [rule for rule in ALERTS if rule["alert"] == name]
    number, unit = re.fullmatch(r"(\d+)([sm])", rule["for"]).groups()  # type: ignore[union-attr]
    assert RULES[name] == (rule["labels"]["severity"], int(number) * SECONDS[unit])
    assert re.search(THRESHOLDS[name], rule["expr"].strip()), rule["expr"]


@ON_SQLITE
def test_runbooks_are_links_where_the_operator_says_so(world: World, tmp_path: Path) -> None:
    page = "https://docs.example.com/octet/operations.html"
    settings = Settings(data_dir=tmp_path, runbooks_url=page)
    world.context.give_up()
    world.clock.turn(61)
    with TestClient(create_app(settings, database=world.database), base_url="http://127.0.0.1:8000") as client:
        assert firing(client)["OctetNoLeader"]["runbook"] == f"{page}#octetnoleader"
    for wrong in ("javascript:alert(1)", f"{page}#part", "docs.example.com"):
        with pytest.raises(ValidationError, match="OCTET_RUNBOOKS_URL"):
            Settings(data_dir=tmp_path, runbooks_url=wrong)
