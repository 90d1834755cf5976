"""A checkpoint's files: listed and sent as they were registered, and nothing else from the server's disk."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import CheckpointReport
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World, step

CONTENT = {"tensors.safetensors": b"\x00\xff" * 70_000, "state.json": b"{}"}


class Saved(NamedTuple):
    url: str
    folder: Path
    rank: Rank


def write_checkpoint(world: World, job_id: str, number: int = 2) -> CheckpointReport:
    """Write files as a worker does, and return the report about them."""
    folder = world.settings.job_dir(job_id) / "checkpoints" / f"step_{number:010}"
    folder.mkdir(parents=True)
    files = {}
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
        files[name] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = json.dumps({"version": 1, "step": number, "files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    sha256 = hashlib.sha256(manifest).hexdigest()
    return CheckpointReport(step=number, name=folder.name, num_bytes=140_002, sha256=sha256, loss=1.0)


@pytest.fixture
def saved(world: World) -> Saved:
    job_id, rank = world.start()
    report = write_checkpoint(world, job_id)
    rank.send(step(1), step(2), report)
    folder = world.settings.job_dir(job_id) / "checkpoints" / report.name
    return Saved(f"/v1/jobs/{job_id}/checkpoints/{report.name}/files", folder, rank)


@ON_SQLITE
def test_the_list_and_the_contents(client: TestClient, saved: Saved) -> None:
    page = client.get(saved.url).json()
    assert [file["path"] for file in page["data"]] == ["tensors.safetensors", "state.json", "manifest.json"]
    assert not page["has_more"]
    for file in page["data"]:
        answer = client.get(f"{saved.url}/{file['path']}")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert int(answer.headers["content-length"]) == len(answer.content) == file["num_bytes"]
        assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]


@ON_SQLITE
def test_a_checkpoint_has_its_id_as_another_name(client: TestClient, saved: Saved) -> None:
    job_url = saved.url.rpartition("/checkpoints/")[0]
    [checkpoint] = client.get(f"{job_url}/checkpoints").json()["data"]
    assert client.get(f"{job_url}/checkpoints/{checkpoint['id']}/files").json() == client.get(saved.url).json()


@ON_SQLITE
def test_nothing_else_is_sent(client: TestClient, saved: Saved) -> None:
    (saved.folder / "secret").write_text("not in the manifest")
    for path in (
        "../manifest.json",
        "..%2Fstep_0000000002%2Fstate.json",
        "%2e%2e/%2e%2e/spool",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "other",
        "secret",
        "state.json%00",
        "state.json/",
    ):
        answer = client.get(f"{saved.url}/{path}")
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json", path


@ON_SQLITE
def test_a_manifest_that_names_files_elsewhere_is_not_followed(client: TestClient, world: World) -> None:
    """Even one that a worker has registered."""
    job_id, rank = world.start()
    report = write_checkpoint(world, job_id)
    folder = world.settings.job_dir(job_id) / "checkpoints" / report.name
    outside = world.settings.data_dir / "outside"
    outside.write_text("secret")
    (folder / "link").symlink_to(outside.resolve())
    paths = ["../../../../outside", str(outside.resolve()), "link"]
    manifest = json.dumps({"files": {path: {"num_bytes": 6, "sha256": "0" * 64} for path in paths}}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    rank.send(step(1), step(2), report.model_copy(update={"sha256": hashlib.sha256(manifest).hexdigest()}))
    url = f"/v1/jobs/{job_id}/checkpoints/{report.name}/files"
    assert [file["path"] for file in client.get(url).json()["data"]] == ["link", "manifest.json"]
    for path in ("link", "../../../../outside", "%2e%2e/%2e%2e/%2e%2e/%2e%2e/outside"):
        assert client.get(f"{url}/{path}").status_code == 404


@ON_SQLITE
def test_files_that_this_server_cannot_read(client: TestClient, saved: Saved) -> None:
    """Remove the files: in a cluster, the API may not share the workers' folder."""
    shutil.rmtree(saved.folder)
    answer = client.get(saved.url)
    assert answer.status_code == 404
    assert "does not share the workers' data folder" in answer.json()["detail"]
    assert client.get(f"{saved.url}/state.json").status_code == 404


@ON_SQLITE
def test_a_manifest_that_is_not_the_registered_one(client: TestClient, saved: Saved) -> None:
    for content in (b"{}", b"\xff not JSON"):
        (saved.folder / "manifest.json").write_bytes(content)
        answer = client.get(saved.url)
        assert answer.status_code == 404, content
        assert "does not have the registered SHA-256" in answer.json()["detail"]


@ON_SQLITE
def test_a_registered_manifest_of_another_form(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1))
    for number, content in enumerate((b"{}", b"\xff not JSON", b'{"files": [1]}', b'{"files": {"a": 3}}'), start=2):
        report = write_checkpoint(world, job_id, number)
        (world.settings.job_dir(job_id) / "checkpoints" / report.name / "manifest.json").write_bytes(content)
        rank.send(step(number), report.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()}))
        answer = client.get(f"/v1/jobs/{job_id}/checkpoints/{report.name}/files")
        assert answer.status_code == 404, content
        assert "is not of this version" in answer.json()["detail"]


@ON_SQLITE
def test_a_checkpoint_that_is_not_there(client: TestClient, saved: Saved) -> None:
    for name in ("step_0000000003", "ckpt_01kg9ys7g0zn9d2mqxrybeyjtc", "..", "%00", "é"):
        answer = client.get(saved.url.replace("step_0000000002", name))
        assert answer.status_code == 404, name


@ON_SQLITE
def test_a_checkpoint_of_another_job(client: TestClient, saved: Saved, world: World) -> None:
    other = world.submit()
    job_id = saved.url.split("/")[3]
    assert client.get(saved.url.replace(job_id, other)).status_code == 404
    assert client.get(saved.url.replace(job_id, "job_01kg9ys7g0zn9d2mqxrybeyjtc")).status_code == 404
