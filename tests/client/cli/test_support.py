"""`octet doctor` and `octet debug` against the real application, with secrets planted in all that reaches the archive."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octet.api_schemas import EventReport, FailureReason, FinishedReport, LogReport
from octet.client import Client, doctor
from octet.client.cli import build_app
from octet.client.doctor import Checkup
from octet.client.redact import LEFT_OUT
from tests.client.octet_app import OctetApp

FILES = {
    "README.txt", "attempts.json", "checkpoints.json", "checkup.json", "curve.jsonl", "events.jsonl", "job.json", "log.txt",
}  # fmt: skip
SECRETS = {
    "label": "hf_LabelLabelLabelLabelLabel",
    "log": "log-pass-word",
    "log of an error": "ghp_0123456789abcdefghij0123456789",
    "event": "AKIAIOSFODNN7EXAMPLE",
    "message": "message-pass-word",
    "key of this terminal": "the-key-of-this-terminal",
}


@pytest.fixture
def octet(app: OctetApp, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    # Asking torch takes seconds; test_torch_is_asked_in_a_process_of_its_own does.
    monkeypatch.setattr(doctor, "ASK_TORCH", """print('{"cuda": null, "devices": []}')""")

    def run(*arguments: str) -> Result:
        env = {"OCTET_URL": app.url, "OCTET_API_KEY": SECRETS["key of this terminal"]}
        return CliRunner().invoke(build_app(), list(arguments), env=env, catch_exceptions=False)

    return run


@pytest.fixture
def unlucky(app: OctetApp, client: Client, runnable: dict[str, Any]) -> str:
    """A job that failed, with a secret in each of a user's words."""
    job = client.submit(runnable | {"name": "unlucky", "labels": {"note": SECRETS["label"]}})
    rank = app.start_rank(job.id)
    rank.train(steps=3)
    rank.report(
        LogReport(
            level="INFO", message=f"connecting to postgresql://me:{SECRETS['log']}@db/x as {SECRETS['key of this terminal']}"
        ),
        LogReport(level="ERROR", message=f"Traceback\n  token = {SECRETS['log of an error']}"),
        EventReport(type="user.note", message=f"reads with {SECRETS['event']}", data={"api_key": "data-pass-word"}),
    )
    why = f"no such bucket; password={SECRETS['message']}"
    rank.report(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message=why))
    return job.id


def test_debug_writes_one_archive_without_the_planted_secrets(
    octet: Callable[..., Result], unlucky: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.tar.gz"
    shown = octet("debug", "unlucky", "--out", str(path))
    assert shown.exit_code == 0
    with tarfile.open(path) as archive:
        texts = {Path(name).name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
        assert {Path(name).parent.name for name in archive.getnames()} == {"report"}
    assert set(texts) == FILES
    for secret in (*SECRETS.values(), "data-pass-word"):
        assert [name for name, text in texts.items() if secret in text] == [], secret
    job = json.loads(texts["job.json"])
    assert (job["id"], job["state"], job["labels"]) == (unlucky, "failed", {"note": LEFT_OUT})
    assert f"no such bucket; password={LEFT_OUT}" == job["message"]
    assert [json.loads(line)["step"] for line in texts["curve.jsonl"].splitlines()] == [1, 2, 3]
    assert f"connecting to postgresql://{LEFT_OUT}@db/x as {LEFT_OUT}" in texts["log.txt"]
    assert "user.note" in texts["events.jsonl"]
    left_out = int(texts["README.txt"].split("\n\n")[-1].split()[0])
    assert left_out >= len(SECRETS)
    assert f"{left_out} secrets were left out" in shown.stdout
    # Written over by a second run, a file that was sent might be another than the one that was read through.
    again = octet("debug", "unlucky", "--out", str(path))
    assert again.exit_code == 2
    assert "--out" in again.stderr


def test_doctor_looks_at_everything(octet: Callable[..., Result], app: OctetApp) -> None:
    checkup = Checkup.model_validate_json(octet("doctor", "--json").stdout)
    found = {check.part: check for check in checkup.checks}
    assert {"octet", "extra service", "extra worker", "processors", "driver", "torch", "server", "pool cpu", "disk"} <= set(
        found
    )
    assert "torch 2" in found["extra worker"].found
    assert found["pool cpu"].found.startswith("cpu, ")
    # Nobody leads in this application, so it takes jobs and runs none.
    assert found["server"].standing == "bad"
    # Jobs of other tests on this server may have fired alerts of their own.
    alerts = {(check.standing, check.hint) for check in checkup.checks if check.part == "alert"}
    assert ("bad", "See docs/operations.md#octetnoleader") in alerts
    shown = octet("doctor")
    assert shown.exit_code == 1
    (line,) = [line.split() for line in shown.stdout.splitlines() if "is not ready" in line]
    assert line[:3] == ["BAD", "server", app.url]
    assert found["server"].hint == "no dispatcher leads: jobs are accepted, and wait until one does"


def test_doctor_without_a_server(octet: Callable[..., Result]) -> None:
    shown = octet("doctor", "--json", "--url", "http://127.0.0.1:9")
    found = {check.part: check for check in Checkup.model_validate_json(shown.stdout).checks}
    assert found["server"].standing == "note"
    assert found["server"].hint is not None
    assert "octet serve" in found["server"].hint
    assert found["port 9"].found == "free, for octet serve"


def test_doctor_without_the_servers_key(octet: Callable[..., Result], tmp_path: Path) -> None:
    with OctetApp(tmp_path, api_keys=("a-key-of-another-terminal",)) as app:
        shown = octet("doctor", "--json", "--url", app.url)
    found = {check.part: check for check in Checkup.model_validate_json(shown.stdout).checks}
    assert found["server"].standing == "bad"
    assert (
        found["server"].hint
        == "Set OCTET_API_KEY, or api_key in Python, to a key that this server has, or sign in: octet login"
    )
    assert found[f"port {app.url.rpartition(':')[2]}"].found == "the server's"
