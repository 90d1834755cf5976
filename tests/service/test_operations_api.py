"""Health, readiness, metrics, levels and pools."""

from datetime import datetime

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from octet.api_schemas import FailureReason, FinishedReport, PhaseReport
from octet.api_schemas.levels import LEVELS
from tests.service.databases import ON_SQLITE
from tests.service.world import World


def samples(client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples}


@ON_SQLITE
def test_ready_means_that_somebody_leads(client: TestClient, world: World) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    world.clock.turn(6)
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").json() == {"status": "ok"}
    world.renew()
    assert client.get("/readyz").status_code == 200
    world.context.give_up()
    assert client.get("/readyz").status_code == 503


@ON_SQLITE
def test_prometheus_sees_jobs_slots_attempts_and_the_last_values(client: TestClient, world: World) -> None:
    done, rank = world.start()
    rank.train(1, 2)
    rank.succeed()
    _, rank = world.start(name="fails")
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY))
    live, rank = world.start(name="lives")
    rank.train(1, 2, 3)
    seen = samples(client)
    for state, count in (("succeeded", 1), ("failed", 1), ("running", 1)):
        assert seen["octet_jobs", (("pool", "cpu"), ("state", state))] == count
    assert seen["octet_attempts_total", (("outcome", "failed"), ("reason", "out_of_memory"))] == 1
    assert seen["octet_attempts_total", (("outcome", "succeeded"), ("reason", ""))] == 1
    assert seen["octet_pool_slots", (("kind", "configured"), ("pool", "cpu"))] == 2
    assert seen["octet_pool_slots", (("kind", "used"), ("pool", "cpu"))] == 1
    of_job = (("level", "fp32"), ("pool", "cpu"), ("tenant", "default"))
    assert seen["octet_job_step", (("job_id", live), *of_job)] == 3
    assert seen["octet_job_step", (("job_id", done), *of_job)] == 2
    left = {labels for name, labels in seen if name == "octet_job_remaining_seconds"}
    assert left == {(("job_id", live), *of_job)}, "a job that is over has no time left"
    assert seen["octet_dispatcher_leads", ()] == 1
    world.clock.turn(16 * 60)
    assert not [labels for name, labels in samples(client) if name == "octet_job_step" and ("job_id", done) in labels]


@ON_SQLITE
def test_waits_and_phases_are_measured_where_they_are_reported(client: TestClient, world: World) -> None:
    job_id = world.submit()
    world.clock.turn(2)
    world.dispatch()
    rank = world.rank_of(job_id)
    world.clock.turn(3)
    batch = rank.batch(PhaseReport(phase="process_up"))
    headers = {"Authorization": f"Bearer {rank.order.token}"}
    client.post(f"/internal/v1/attempts/{rank.order.attempt_id}/reports", json=batch.model_dump(mode="json"), headers=headers)
    seen = samples(client)
    assert seen["octet_job_queue_wait_seconds_sum", ()] == 2
    assert seen["octet_job_start_overhead_seconds_sum", (("phase", "process_up"),)] == 3


def test_the_warm_up_is_a_phase_of_the_start_where_a_model_is_compiled(client: TestClient, world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    rank = world.rank_of(job_id)
    path, headers = f"/internal/v1/attempts/{rank.order.attempt_id}/reports", {"Authorization": f"Bearer {rank.order.token}"}
    client.post(path, json=rank.batch(PhaseReport(phase="first_step")).model_dump(mode="json"), headers=headers)
    assert client.get(f"/v1/jobs/{job_id}").json()["start"]["warmed_up_at"] is None
    world.clock.turn(40)
    client.post(path, json=rank.batch(PhaseReport(phase="warmed_up")).model_dump(mode="json"), headers=headers)
    start = client.get(f"/v1/jobs/{job_id}").json()["start"]
    waited = datetime.fromisoformat(start["warmed_up_at"]) - datetime.fromisoformat(start["first_step_at"])
    assert waited.total_seconds() == 40
    [attempt] = client.get(f"/v1/jobs/{job_id}/attempts").json()["data"]
    assert attempt["warmed_up_at"] == start["warmed_up_at"]
    assert samples(client)["octet_job_start_overhead_seconds_sum", (("phase", "warmed_up"),)] == 40


@ON_SQLITE
def test_requests_are_measured_by_route_not_by_path(client: TestClient, world: World) -> None:
    client.get(f"/v1/jobs/{world.submit()}")
    client.get("/nowhere")
    seen = samples(client)
    name = "octet_http_request_duration_seconds_count"
    assert seen[name, (("code", "200"), ("method", "GET"), ("route", "/v1/jobs/{job_id}"))] == 1
    assert seen[name, (("code", "404"), ("method", "any"), ("route", "unmatched"))] == 1


@ON_SQLITE
def test_levels_are_the_table(client: TestClient) -> None:
    levels = client.get("/v1/levels").json()["data"]
    assert [level["name"] for level in levels] == list(LEVELS)


@ON_SQLITE
def test_models_are_the_families_with_their_bytes(client: TestClient) -> None:
    families = {family["family"]: family for family in client.get("/v1/models").json()["data"]}
    (tiny, *_) = families["gpt"]["presets"]
    assert tiny["name"] == "gpt-tiny"
    assert tiny["sizes"]["hidden_size"] == 128
    assert tiny["bytes_by_level"]["fp32"] == 16 * tiny["num_parameters"] > tiny["bytes_by_level"]["O2"]
    assert families["swin"]["metrics"] == {"image_class": ["top1_accuracy", "top5_accuracy"]}
    assert "llama" in families["huggingface"]["architectures"]["next_token"]


def test_pools_show_what_is_free_and_who_waits(client: TestClient, world: World) -> None:
    world.start(workers=2)
    world.submit()
    cpu, h100 = client.get("/v1/pools").json()["data"]
    assert (cpu["slots"], cpu["slots_used"], cpu["jobs_live"], cpu["jobs_queued"]) == (2, 2, 1, 1)
    assert (h100["slots"], h100["slots_used"], h100["accelerator"]) == (8, 0, "cuda")
    assert (cpu["slots_present"], h100["slots_present"]) == (2, 8)
