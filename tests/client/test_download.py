"""Checkpoints are downloaded from the real application, checked, and exported, by the client and by the command."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner, Result

from octet.api_schemas import Checkpoint, CheckpointReport, ExportReport, Job, JobSpec
from octet.api_schemas.export import MismatchCard
from octet.client import ApiError, Client, DownloadFailed
from octet.client.cli import build_app
from tests.client.octet_app import API_KEY, OctetApp
from tests.kit.training import train

pytestmark = pytest.mark.slow

MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def trained_dir(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> tuple[Path, CheckpointReport]:
    """Train a small job at O3. Return its folder and the reports of its checkpoints."""
    torch.set_num_threads(1)
    document = {
        "name": "small",
        "model": {
            "family": "llama", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2,
            "vocab_size": 256, "max_sequence_length": 64,
        },
        "precision": {"level": "O3"},
        "data": {"path": corpus},
        "training": {"steps": 4, "checkpoint_every": 2, "global_batch_size": 4, "sequence_length": 32, "eval_batches": 1},
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("job")
    recorder, _ = train(document, folder)
    return folder, recorder.of(CheckpointReport)


@pytest.fixture
def finished(app: OctetApp, client: Client, runnable: dict[str, Any], trained_dir: tuple[Path, list[CheckpointReport]]) -> Job:
    """A job on the server with these checkpoints."""
    job = client.submit(runnable)
    folder, reports = trained_dir
    own = app.settings.job_dir(job.id)
    own.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder / "checkpoints", own / "checkpoints")
    rank = app.start_rank(job.id)
    rank.train(steps=4)
    rank.report(*reports)
    return client.job(job.id)


def newest(client: Client, job: Job) -> Checkpoint:
    return list(client.checkpoints(job.id))[-1]


def octet(app: OctetApp, *arguments: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), env={"OCTET_URL": app.url}, catch_exceptions=False)


def test_what_arrives_is_what_was_saved(client: Client, finished: Job, trained_dir: Any, tmp_path: Path) -> None:
    files = client.download(newest(client, finished), tmp_path / "new" / "folder")
    source = trained_dir[0] / "checkpoints" / "step_0000000004"
    assert sorted(file.path for file in files) == sorted(path.name for path in source.iterdir())
    for path in source.iterdir():
        assert (tmp_path / "new" / "folder" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 3


def test_content_that_changed_on_the_way_is_refused(app: OctetApp, finished: Job, tmp_path: Path) -> None:
    class Flip(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if not request.url.path.endswith("tensors.safetensors"):
                return response
            content = bytearray(response.read())
            content[7] ^= 1
            return httpx.Response(200, content=bytes(content))

    with (
        Client(app.url, transport=Flip()) as client,
        pytest.raises(DownloadFailed, match=r"tensors\.safetensors of ckpt_.*arrived"),
    ):
        client.download(newest(client, finished), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"state.json"}, "neither the file nor the manifest"


def test_another_manifest_than_the_registered_one_is_refused(client: Client, finished: Job, tmp_path: Path) -> None:
    checkpoint = newest(client, finished).model_copy(update={"sha256": "0" * 64})
    with pytest.raises(DownloadFailed, match="another manifest"):
        client.download(checkpoint, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["../escaped", "/escaped", "a/../../escaped"])
def test_a_server_cannot_write_elsewhere(client: Client, finished: Job, path: str, tmp_path: Path) -> None:
    checkpoint = newest(client, finished)

    def handler(request: httpx.Request) -> httpx.Response:
        files = [
            {"path": path, "num_bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
            {"path": MANIFEST, "num_bytes": 0, "sha256": checkpoint.sha256},
        ]
        page = {"object": "list", "data": files, "has_more": False, "first_id": None, "last_id": None}
        return httpx.Response(200, content=json.dumps(page))

    with (
        Client("http://octet.test", transport=httpx.MockTransport(handler)) as other,
        pytest.raises(DownloadFailed, match="does not lie in the checkpoint's folder"),
    ):
        other.download(checkpoint, tmp_path / "in")
    assert not list(tmp_path.iterdir())


def test_a_connection_that_breaks_off_is_tried_again(app: OctetApp, finished: Job, tmp_path: Path) -> None:
    """The download starts over: the file holds nothing of the first try."""
    tries = []

    class BreakOnce(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.url.path.endswith("tensors.safetensors") and not tries:
                tries.append(1)

                def half() -> Any:
                    yield response.read()[:100]
                    raise httpx.ReadError("broken off")

                return httpx.Response(200, content=half())
            return response

    with Client(app.url, transport=BreakOnce()) as client:
        files = client.download(newest(client, finished), tmp_path)
    assert tries == [1]
    assert all((tmp_path / file.path).stat().st_size == file.num_bytes for file in files)


@pytest.mark.system
def test_download_and_export_by_command(app: OctetApp, client: Client, finished: Job, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shown = octet(app, "download", finished.id, "--out", str(saved))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("3 files, ")
    assert "of step 4 are in" in shown.stdout
    out = tmp_path / "out"
    exported = octet(app, "export", str(saved), "--format", "fp8", "--strategy", "channel", "--out", str(out))
    assert exported.exit_code == 0, exported.stderr
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    again = octet(app, "export", str(saved), "--out", str(out))
    assert again.exit_code == 2
    assert "is not an empty folder" in again.stderr
    nothing = octet(app, "export", str(tmp_path), "--out", str(tmp_path / "other"))
    assert (nothing.exit_code, "holds no checkpoint" in nothing.stderr) == (2, True)
    assert not (tmp_path / "other").exists()


def test_download_by_command(app: OctetApp, finished: Job, tmp_path: Path) -> None:
    shown = octet(app, "download", finished.id, "--out", str(tmp_path / "saved"))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("3 files, ")
    assert "of step 4 are in" in shown.stdout
    assert len(list((tmp_path / "saved").iterdir())) == 3


def test_an_earlier_checkpoint_by_its_id(app: OctetApp, client: Client, finished: Job, tmp_path: Path) -> None:
    first, _ = client.checkpoints(finished.id)
    shown = octet(app, "download", finished.id, "--checkpoint", first.id, "--out", str(tmp_path), "--json")
    assert [file["path"] for file in json.loads(shown.stdout)][-1] == MANIFEST
    assert json.loads((tmp_path / MANIFEST).read_text())["step"] == first.step == 2


def test_what_is_not_there(app: OctetApp, client: Client, runnable: dict[str, Any], finished: Job, tmp_path: Path) -> None:
    empty = client.submit(runnable)
    shown = octet(app, "download", empty.id, "--out", str(tmp_path / "out"))
    assert (shown.exit_code, "has no checkpoint yet" in shown.stderr) == (2, True)
    shown = octet(app, "download", finished.id, "--checkpoint", "ckpt_other", "--out", str(tmp_path / "out"))
    assert (shown.exit_code, "has no checkpoint ckpt_other" in shown.stderr) == (2, True)
    shutil.rmtree(app.settings.job_dir(finished.id) / "checkpoints")
    shown = octet(app, "download", finished.id, "--out", str(tmp_path / "out"))
    assert (shown.exit_code, "cannot be read here" in shown.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_keys_are_needed_for_files_as_for_all_else(tmp_path: Path, runnable: dict[str, Any]) -> None:
    with OctetApp(tmp_path, api_keys=(API_KEY,)) as app:
        with Client(app.url, API_KEY) as owner:
            job = owner.submit(JobSpec.model_validate(runnable))
        for path in ("files", "files/state.json"):
            url = f"{app.url}/v1/jobs/{job.id}/checkpoints/step_0000000002/{path}"
            assert httpx.get(url, trust_env=False).status_code == 401
            known = httpx.get(url, trust_env=False, headers={"Authorization": f"Bearer {API_KEY}"})
            assert known.status_code == 404
        with Client(app.url) as stranger, pytest.raises(ApiError, match="an API key is needed"):
            list(stranger.checkpoint_files(job.id, "step_0000000002"))


def test_an_export_is_asked_for_shown_and_downloaded(
    app: OctetApp, client: Client, runnable: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(runnable)
    rank = app.start_rank(job.id)
    rank.train(steps=4)
    rank.report(as_exported(app, job.id))
    [export] = client.exports(job.id)
    asked = octet(app, "exports", job.id)
    assert (asked.exit_code, "step_0000000004_fp8" in asked.stdout, "0.25" in asked.stdout) == (0, True, True)
    assert "ADDRESS" not in asked.stdout
    rank.report(as_exported(app, job.id).model_copy(update={"address": "s3://models/a"}))
    assert "s3://models/a" in octet(app, "exports", job.id).stdout
    without_form = octet(app, "exports", job.id, "--target", "s3://models")
    assert (without_form.exit_code, "--format" in without_form.stderr) == (2, True)
    assert json.loads(octet(app, "exports", job.id, "--json").stdout)[0]["id"] == export.id
    for wanted in ("newest", export.id, export.name):
        out = tmp_path / wanted
        assert octet(app, "download", job.id, "--export", wanted, "--out", str(out)).exit_code == 0
        assert (out / "config.json").read_bytes() == b"{}"
    missing = octet(app, "download", job.id, "--export", "other", "--out", str(tmp_path))
    assert (missing.exit_code, "octet exports" in missing.stderr) == (2, True)
    refused = octet(app, "exports", job.id, "--format", "fp8")
    assert (refused.exit_code, "allowed: succeeded" in refused.stderr) == (2, True)


def as_exported(app: OctetApp, job_id: str) -> ExportReport:
    """Write an export as a worker does, and return the report about it."""
    folder = app.settings.job_dir(job_id) / "exports" / "step_0000000004_fp8"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(b"{}")
    files = {"config.json": {"num_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}
    manifest = json.dumps({"version": 1, "step": 4, "files": files}).encode()
    (folder / MANIFEST).write_bytes(manifest)
    found = {"kl_divergence": 0.25, "top1_agreement": 0.5, "largest_logit_difference": 1.0}
    card = {"num_tokens": 8, "tokens_sha256": "a" * 64, "evaluation": found, "weights": found}
    return ExportReport(
        step=4,
        name=folder.name,
        format="fp8",
        layout="compressed-tensors",
        activations="none",
        num_bytes=2 + len(manifest),
        sha256=hashlib.sha256(manifest).hexdigest(),
        mismatch=MismatchCard.model_validate(card),
    )
