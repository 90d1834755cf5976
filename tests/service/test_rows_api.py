"""`GET /v1/rows`: compact rows that say what the jobs say, every filter and order, and no walk over all jobs."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from octet.api_schemas import EvaluationReport, FailureReason, FinishedReport, JobState, StepReport
from octet.api_schemas.rows import RowPage
from octet.service import store
from octet.service.db.tables import JobRow
from octet.service.jobs.rows import row_json, short, spark_steps
from octet.service.store.rows import RowFilter, count_rows, list_rows
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

Row = dict[str, Any]


def rows(client: TestClient, query: str = "") -> list[Row]:
    answer = client.get(f"/v1/rows{query}")
    assert answer.status_code == 200, answer.text
    assert answer.text == RowPage.model_validate_json(answer.text).model_dump_json()
    found: list[Row] = answer.json()["data"]
    return found


def names(client: TestClient, query: str) -> list[str]:
    return [row["name"] for row in rows(client, query)]


@ON_SQLITE
def test_a_row_says_what_the_job_says(client: TestClient, world: World) -> None:
    running, rank = world.start(name="runs")
    rank.train(*range(1, 4))
    rank.send(*[EvaluationReport(step=number, loss=loss, tokens=8) for number, loss in ((1, 4.0), (2, 3.0), (3, 3.5))])
    world.start(name="fills-the-pool")
    waiting = world.submit(name="waits", workers=2)
    by_name = {row["name"]: row for row in rows(client)}
    row, job = by_name["runs"], client.get(f"/v1/jobs/{running}").json()
    of_job = ("id", "name", "tenant", "state", "reason", "created_at", "started_at", "finished_at")
    assert {name: row[name] for name in of_job} == {name: job[name] for name in of_job}
    of_progress = ("step", "steps", "loss", "tokens_per_s", "remaining_s")
    assert {name: row[name] for name in of_progress} == {name: short(job["progress"][name]) for name in of_progress}
    assert (row["level"], row["pool"]) == (job["spec"]["precision"]["level"], job["spec"]["resources"]["pool"])
    assert row["best_evaluation_loss"] == 3.0
    assert row["sparkline"] == [5.0, 2.5, 1.67]
    waits, place = by_name["waits"], client.get(f"/v1/jobs/{waiting}").json()["queue"]
    assert (waits["why"], waits["position"], waits["steps"]) == (place["why"], 1, 4)
    assert waits["sparkline"] == []


def test_a_failed_job_says_why_at_most_120_characters_long(client: TestClient, world: World) -> None:
    _, rank = world.start()
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="gone " * 100))
    (row,) = rows(client)
    assert (row["state"], row["reason"], len(row["why"])) == ("failed", "data_error", 120)


def test_every_filter_and_order(client: TestClient, world: World) -> None:
    for name, level, labels in (("b-one", "O2", {"team": "x"}), ("a_Two", "fp32", {"team": "x"}), ("c-three", "O2", {})):
        world.submit(name=name, precision={"level": level}, labels=labels, pool="h100" if level == "O2" else "cpu")
    world.cancel(rows(client, "?q=three")[0]["id"])
    assert names(client, "") == ["c-three", "a_Two", "b-one"]
    assert names(client, "?sort=created") == ["b-one", "a_Two", "c-three"]
    assert names(client, "?sort=name") == ["a_Two", "b-one", "c-three"]
    assert names(client, "?q=T") == ["c-three", "a_Two"]
    assert names(client, "?q=_") == ["a_Two"]
    assert names(client, "?q=%25") == []
    assert names(client, "?level=O2&state=queued") == ["b-one"]
    assert names(client, "?state=queued&state=cancelled") == ["c-three", "a_Two", "b-one"]
    assert names(client, "?label=team:x&pool=cpu") == ["a_Two"]
    assert names(client, "?tenant=default&offset=1&limit=1") == ["a_Two"]
    assert names(client, "?tenant=other") == []
    ids = {row["name"]: row["id"] for row in rows(client)}
    assert names(client, f"?id={ids['a_Two']}&id={ids['c-three']}&sort=name") == ["a_Two", "c-three"]
    totals = {query: client.get(f"/v1/rows?limit=1{query}").json()["total"] for query in ("", "&state=queued", "&level=O2")}
    assert totals == {"": 3, "&state=queued": 2, "&level=O2": 2}


@pytest.mark.parametrize("order", ["-created", "created", "name", "evaluation"])
def test_pages_end_where_the_next_begins(client: TestClient, world: World, order: str) -> None:
    ids = [world.submit(name=f"job-{number % 3}") for number in range(7)]
    with world.database.write() as session:
        for number, job_id in enumerate(ids[:5]):
            session.get_one(JobRow, job_id).best_evaluation_loss = float(number % 2)
    whole = [row["id"] for row in rows(client, f"?sort={order}")]
    assert sorted(whole) == sorted(ids)
    found: list[str] = []
    while True:
        after = f"&after={found[-1]}" if found else ""
        page = client.get(f"/v1/rows?sort={order}&limit=2{after}").json()
        found += [row["id"] for row in page["data"]]
        assert page["last_id"] == found[-1]
        if not page["has_more"]:
            break
    assert found == whole
    assert [row["id"] for row in rows(client, f"?sort={order}&offset=3&limit=2")] == whole[3:5]


@ON_SQLITE
def test_a_hundred_rows_take_60_kb(client: TestClient, world: World) -> None:
    """Also where each has a long name, every number and a whole picture."""
    for number in range(100):
        world.submit(name=f"llama-3-8b-on-source-code-O2-{number:03}", workers=2)
    answer = client.get("/v1/rows?limit=100", headers={"Accept-Encoding": "identity"})
    assert len(answer.json()["data"]) == 100
    assert len(answer.content) <= 60_000
    compressed = client.get("/v1/rows?limit=100", headers={"Accept-Encoding": "gzip"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert compressed.json() == answer.json()
    with world.database.read() as session:
        row = list_rows(session, RowFilter(), "-created", 1, 0, None)[0]
    third, now = 1 / 3e-4, world.clock.now()
    numbers = {"step": 123_456, "loss": third, "best_evaluation_loss": third, "tokens_per_s": third, "remaining_s": third}
    running = row._replace(state=JobState.RUNNING, started_at=now, **numbers)
    assert len(row_json(running, None, (11.1,) * 32)) <= 599
    failed = running._replace(state=JobState.FAILED, message="a message of some length " * 3, finished_at=now, remaining_s=None)
    assert len(row_json(failed, None, (1.23,) * 32)) <= 700, "a failed one may have a long message"


@ON_SQLITE
def test_a_picture_follows_the_curve_and_a_resumed_attempt(client: TestClient, world: World) -> None:
    job_id, rank = world.start(steps=200, max_failures=1)

    def picture() -> list[float]:
        found: list[float] = rows(client)[0]["sparkline"]
        return found

    rank.train(*range(1, 41))
    assert picture() == [float(f"{5 / number:.3g}") for number in spark_steps(40)]
    rank.train(*range(41, 71))
    assert picture() == [float(f"{5 / number:.3g}") for number in spark_steps(70)]
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
    world.dispatch()
    world.turn(10)
    world.dispatch()
    assert picture() == [float(f"{5 / number:.3g}") for number in spark_steps(70)]
    again = world.rank_of(job_id)
    again.begin(resumed_from_step=32)
    again.send(*[step(number, loss=9.0) for number in range(33, 71)])
    assert picture() == [float(f"{5 / number:.3g}") if number <= 32 else 9.0 for number in spark_steps(70)]


@ON_SQLITE
def test_a_list_is_counted_again_only_if_it_can_have_changed(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[RowFilter] = []
    count = count_rows
    monkeypatch.setattr(store.rows, "count_rows", lambda session, wanted: counted.append(wanted) or count(session, wanted))

    def total(query: str) -> int:
        found: int = client.get(f"/v1/rows?{query}").json()["total"]
        return found

    _, rank = world.start()
    for _ in range(2):
        assert (total("level=fp32"), total("level=fp32&state=running")) == (1, 1)
    rank.train(1)
    assert (total("level=fp32"), total("level=fp32&state=running"), len(counted)) == (1, 1, 2)
    rank.succeed()
    assert (total("level=fp32"), total("level=fp32&state=running"), len(counted)) == (1, 0, 3)
    world.submit()
    assert (total("level=fp32"), len(counted)) == (2, 4)


@pytest.mark.parametrize("last_step", [0, 1, 17, 32, 33, 1000, 99_999])
def test_a_picture_has_16_to_32_numbers(last_step: int) -> None:
    steps = spark_steps(last_step)
    assert min(last_step, 16) <= len(steps) <= 32
    assert all(1 <= number <= last_step for number in steps)


@ON_SQLITE
def test_unknown_parameters_and_values_are_refused(client: TestClient) -> None:
    for query in ("?limit=101", "?sort=loss", "?state=lost", "?id=job_1", "?filter=x", "?q=", "?offset=-1", "?after=x"):
        answer = client.get(f"/v1/rows{query}")
        assert answer.status_code == 422, query
        assert answer.json()["errors"], query


@ON_SQLITE
def test_not_finite_losses_are_null_in_a_picture(client: TestClient, world: World) -> None:
    _, rank = world.start()
    lost = StepReport(step=2, loss=None, gradient_norm=None, learning_rate=0.1, tokens=1, step_time_s=0.1, data_wait_s=0.0)
    rank.send(step(1), lost, step(3))
    assert rows(client)[0]["sparkline"] == [5.0, None, 1.67]


PLANS = {
    "all": RowFilter(),
    "pool": RowFilter(pool="cpu"),
    "level": RowFilter(level="O2"),
    "tenant": RowFilter(tenant="default"),
    "text": RowFilter(text="one"),
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("order", ["-created", "name", "evaluation"])
def test_no_list_walks_the_table(world: World, kind: str, order: Any) -> None:
    """SQLite finds the ids of a page in an index, which `EXPLAIN` shows, and sorts nothing.

    PostgreSQL plans by the statistics of a table, which is empty here.
    """
    statements: list[tuple[str, Any]] = []
    for _ in range(3):
        world.submit()

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(world.database._engine, "before_cursor_execute", note)
    with world.database.read() as session:
        list_rows(session, PLANS[kind], order, 100, 0, None)
        event.remove(world.database._engine, "before_cursor_execute", note)
        (of_ids,) = [each for each in statements if each[0].startswith("SELECT jobs.id \nFROM")]
        plan = [row[3] for row in session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {of_ids[0]}", of_ids[1])]
    assert not [line for line in plan if line == "SCAN jobs" or "TEMP B-TREE" in line], plan
