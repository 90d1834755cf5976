"""Exports: registered once, listed, and sent file by file or as one archive; gone with their job."""

import hashlib
import io
import json
import shutil
import tarfile
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm.attributes import flag_modified

from octet.api_schemas import CheckpointReport, ExportReport, ExportSpec, FailureReason, FinishedReport
from octet.service.db.tables import JobRow
from tests.kit.summaries import summary_of
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

CONTENT = {"model.safetensors": b"\x00\xff" * 70_000, "config.json": b"{}", "README.md": b"# Trained"}
CARD = {
    "num_tokens": 512,
    "tokens_sha256": "a" * 64,
    "evaluation": {"kl_divergence": 0.25, "top1_agreement": 0.875, "largest_logit_difference": 1.5},
    "weights": {"kl_divergence": 0.0, "top1_agreement": 1.0, "largest_logit_difference": 0.0},
}


def write_export(world: World, job_id: str, number: int = 2, **changes: Any) -> ExportReport:
    """Write files as a worker does, and return the report about them."""
    name = f"step_{number:010}_fp8"
    folder = world.settings.job_dir(job_id) / "exports" / name
    folder.mkdir(parents=True)
    files = {}
    for path, content in CONTENT.items():
        (folder / path).write_bytes(content)
        files[path] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = json.dumps({"version": 1, "step": number, "files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    fields = {"step": number, "name": name, "num_bytes": 140_011, "sha256": hashlib.sha256(manifest).hexdigest()}
    fields |= {"format": "fp8", "layout": "compressed-tensors", "activations": "none", "mismatch": CARD}
    return ExportReport.model_validate(fields | changes)


def events_of(client: TestClient, job_id: str) -> list[dict[str, Any]]:
    events = client.get(f"/v1/jobs/{job_id}/events").json()["data"]
    return [event for event in events if event["type"] == "job.exported"]


@ON_SQLITE
def test_an_export_is_listed_with_its_card_and_sent(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    report = write_export(world, job_id)
    rank.send(step(1), step(2), report)
    [shown] = client.get(f"/v1/jobs/{job_id}/exports").json()["data"]
    assert (shown["name"], shown["step"], shown["mismatch"]) == (report.name, 2, CARD)
    [event] = events_of(client, job_id)
    assert (event["data"]["kl_divergence"], event["data"]["name"]) == (0.25, report.name)
    metrics = client.get("/metrics").text
    assert any(line.startswith("octet_job_export_kl_divergence{") and line.endswith(" 0.25") for line in metrics.splitlines())

    url = f"/v1/jobs/{job_id}/exports/{report.name}"
    assert client.get(f"/v1/jobs/{job_id}/exports/{shown['id']}/files").json() == client.get(f"{url}/files").json()
    for file in client.get(f"{url}/files").json()["data"]:
        content = client.get(f"{url}/files/{file['path']}").content
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["num_bytes"], file["sha256"])
    answer = client.get(f"{url}/archive")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        members = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        assert list(members)[-1] == f"{report.name}/manifest.json"
        for path, expected in CONTENT.items():
            member = members[f"{report.name}/{path}"]
            assert member is not None
            assert member.read() == expected


@ON_SQLITE
def test_an_export_that_is_reported_again_is_one(client: TestClient, world: World) -> None:
    """A retried attempt finds what one before it wrote, and reports it; another content takes its place."""
    job_id, rank = world.start()
    report = write_export(world, job_id)
    rank.send(step(1), step(2), report, report)
    before = client.get(f"/v1/jobs/{job_id}/exports").json()["data"]
    assert (len(before), len(events_of(client, job_id))) == (1, 1)
    rank.send(report.model_copy(update={"sha256": "b" * 64, "mismatch": None}))
    [after] = client.get(f"/v1/jobs/{job_id}/exports").json()["data"]
    assert (after["sha256"], after["mismatch"], after["id"] != before[0]["id"]) == ("b" * 64, None, True)
    assert len(events_of(client, job_id)) == 2


@ON_SQLITE
def test_an_export_in_an_object_store_is_listed_with_its_address(client: TestClient, world: World) -> None:
    """One that was in the job's folder alone gets an address, and keeps it when it is reported without."""
    job_id, rank = world.start()
    report = write_export(world, job_id)
    address = f"s3://models/{job_id}/{report.name}"
    rank.send(step(1), step(2), report)
    assert client.get(f"/v1/jobs/{job_id}/exports").json()["data"][0]["address"] is None
    rank.send(report.model_copy(update={"address": address}), report.model_copy(update={"address": address}), report)
    [shown] = client.get(f"/v1/jobs/{job_id}/exports").json()["data"]
    assert shown["address"] == address
    first, second = events_of(client, job_id)
    assert ("address" in first["data"], second["data"]["address"]) == (False, address)
    assert f"and in {address}" in second["message"]


@ON_SQLITE
def test_pages_of_exports(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1), step(2), step(3), *(write_export(world, job_id, number) for number in (2, 3)))
    page = client.get(f"/v1/jobs/{job_id}/exports?limit=1").json()
    rest = client.get(f"/v1/jobs/{job_id}/exports?after={page['last_id']}").json()
    assert [[item["step"] for item in part["data"]] for part in (page, rest)] == [[2], [3]]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert client.get(f"/v1/jobs/{job_id}/exports?after=exp_x").status_code == 404


@ON_SQLITE
def test_nothing_else_is_sent(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    report = write_export(world, job_id)
    rank.send(step(1), step(2), report)
    folder = world.settings.job_dir(job_id) / "exports" / report.name
    (folder / "secret").write_text("not in the manifest")
    base = f"/v1/jobs/{job_id}/exports"
    for path in ("../manifest.json", "..%2F..%2Fspool", "%2e%2e/%2e%2e/spool", "%2Fetc%2Fpasswd", "secret", "config.json%00"):
        assert client.get(f"{base}/{report.name}/files/{path}").status_code == 404, path
    for name in ("..", "%2e%2e", "step_0000000003_fp8", "exp_01kg9ys7g0zn9d2mqxrybeyjtc", "%00", "é"):
        for part in ("files", "files/config.json", "archive"):
            assert client.get(f"{base}/{name}/{part}").status_code == 404, (name, part)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")
    assert client.get(f"{base}/{report.name}/archive").status_code == 404
    shutil.rmtree(folder)
    assert "does not share the workers' data folder" in client.get(f"{base}/{report.name}/archive").json()["detail"]


@ON_SQLITE
@pytest.mark.parametrize(
    "changes", [{"name": "../step_0000000002_fp8"}, {"name": "step_0000000002_fp8/x"}, {"mismatch": {"num_tokens": 0}}], ids=str
)
def test_a_report_that_is_none_is_refused(world: World, changes: dict[str, Any]) -> None:
    job_id, _ = world.start()
    report = write_export(world, job_id)
    body = report.model_dump(mode="json") | changes
    with pytest.raises(ValueError, match=r"name|mismatch"):
        ExportReport.model_validate(body)


def test_exports_of_steps_that_are_trained_again_go(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1), step(2), write_export(world, job_id), FinishedReport(outcome="failed"))
    world.dispatch()
    assert len(client.get(f"/v1/jobs/{job_id}/exports").json()["data"]) == 1
    world.retry(job_id)
    world.dispatch()
    world.dispatch()
    world.rank_of(job_id).begin()  # it has no checkpoint, so it begins at the beginning
    assert client.get(f"/v1/jobs/{job_id}/exports").json()["data"] == []


def test_files_of_a_deleted_job_go(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1), step(2), write_export(world, job_id), FinishedReport(outcome="failed"))
    world.dispatch()
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert client.get(f"/v1/jobs/{job_id}/exports").status_code == 404
    world.tidy()
    assert not world.settings.job_dir(job_id).exists()


@ON_SQLITE
def test_a_job_that_succeeded_is_exported_later(client: TestClient, world: World) -> None:
    """Its ranks go on from the last checkpoint; the spec has the export that was asked for."""
    job_id, rank = world.start()
    url = f"/v1/jobs/{job_id}/exports"
    wanted = {"format": "bf16", "when": "end"}
    assert client.post(url, json=wanted).status_code == 409  # it runs
    rank.train(1, 2, 3, 4)
    rank.send(CheckpointReport(step=4, name="step_0000000004", num_bytes=1, sha256="0" * 64, loss=1.0))
    rank.succeed()
    world.dispatch()
    refused = client.post(url, json={"format": "bf16", "activations": "dynamic"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "export.activations")
    assert client.post(url, json={"form": "fp8"}).status_code == 422
    refused = client.post(url, json={"target": "s3://models"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "export.target")
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "succeeded"
    answer = client.post(url, json=wanted)
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert client.post(url, json=wanted).status_code == 409
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert (again.order.spec.export, [ref.step for ref in again.order.checkpoints]) == (ExportSpec(), [4])
    again.begin(4)
    again.send(write_export(world, job_id, 4))
    again.succeed()
    assert [item["step"] for item in client.get(url).json()["data"]] == [4]
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "succeeded"


def succeed(world: World) -> str:
    """Return a job that has succeeded, with a checkpoint of its last step and its summary."""
    job_id, rank = world.start()
    rank.train(1, 2, 3, 4)
    rank.send(CheckpointReport(step=4, name="step_0000000004", num_bytes=1, sha256="0" * 64, loss=1.0))
    rank.send(FinishedReport(outcome="succeeded", summary=summary_of(1.0)))
    world.dispatch()
    return job_id


@ON_SQLITE
def test_a_job_with_tasks_is_exported_later_in_one_form(client: TestClient, world: World) -> None:
    """Tasks of chosen steps belong to exports of every checkpoint."""
    job_id = succeed(world)
    with world.database.write() as session:
        job = session.get_one(JobRow, job_id)
        training = job.spec["training"] | {"eval_every": 2, "checkpoint_every": 2}
        evaluation = {"path": "/tasks", "tasks": ["capitals"], "every": 2}
        job.spec |= {"training": training, "export": {"when": "every_checkpoint"}, "evaluation": evaluation}
        flag_modified(job, "spec")
    answer = client.post(f"/v1/jobs/{job_id}/exports", json={"format": "bf16"})
    assert answer.status_code == 202, answer.json()
    spec = answer.json()["spec"]
    assert (spec["export"]["when"], spec["evaluation"]["every"], spec["evaluation"]["tasks"]) == ("end", 0, ["capitals"])


@pytest.mark.parametrize("ends", ["failed", "cancelled while it runs", "cancelled in the queue", "cancelled while paused"])
def test_a_job_that_succeeded_stays_so_without_the_export(client: TestClient, world: World, ends: str) -> None:
    """Whatever becomes of the attempt that exports: an event says why the export is missing."""
    job_id = succeed(world)
    before = client.get(f"/v1/jobs/{job_id}").json()
    assert client.post(f"/v1/jobs/{job_id}/exports", json={"max_kl_divergence": 0.5}).status_code == 202
    if ends == "cancelled while paused":
        world.pause(job_id)
    elif ends != "cancelled in the queue":
        world.dispatch()
        world.dispatch()
        rank = world.rank_of(job_id)
        rank.begin(4)
    if ends != "failed":
        world.cancel(job_id)
    if ends == "failed":
        rank.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY, message="no host memory"))
    elif ends == "cancelled while it runs":
        rank.send(FinishedReport(outcome="cancelled"))
    after = client.get(f"/v1/jobs/{job_id}").json()
    assert (after["state"], after["reason"], after["message"]) == ("succeeded", None, None)
    assert after["summary"] == before["summary"]
    assert after["summary"] is not None
    [event] = [event for event in world.events(job_id) if event.type == "export.failed"]
    assert ("no host memory" if ends == "failed" else "it was cancelled") in event.message
    assert client.post(f"/v1/jobs/{job_id}/exports", json={}).status_code == 202  # it may be asked for again


def test_a_job_that_goes_on_after_an_export_can_fail(client: TestClient, world: World) -> None:
    job_id = succeed(world)
    world.retry(job_id, steps=6)
    world.dispatch()
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin(4)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY))
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "failed"


@ON_SQLITE
def test_a_job_without_its_last_checkpoint_cannot_be_exported(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2, 3, 4)
    rank.succeed()
    answer = client.post(f"/v1/jobs/{job_id}/exports", json={})
    assert (answer.status_code, "no checkpoint of its last step" in answer.json()["detail"]) == (409, True)
