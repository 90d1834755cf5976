"""Trackers get what rank 0 reports: read back by their own packages, continued by a second attempt, and never in the way."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octet.worker.rank.main import main
from octet.worker.reporting.trackers import feed

STEPS = 4
# MLflow 3.17 uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def train(document: dict[str, Any], folder: Path, *options: str, steps: int = STEPS, **changes: Any) -> int:
    """Run a small job as one rank, without a service. Returns its exit status."""
    training = document["training"] | {"steps": steps, "eval_every": 2, "checkpoint_every": 2}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(document | {"training": training} | changes))
    return main([str(folder / "job.json"), "--job-dir", str(folder), *options])


def loss_of(folder: Path) -> float:
    summary = json.loads((folder / "summary.json").read_text())
    return float(summary["final_loss"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "trackers" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def runs_of(uri: str) -> tuple[Any, list[Any]]:
    """Return MLflow's client and the runs of experiment `octet`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("octet")
    assert experiment is not None
    return client, list(client.search_runs([experiment.experiment_id]))


def test_tensorboard_shows_a_job_and_its_second_attempt_as_one_run(spec_document: dict[str, Any], tmp_path: Path) -> None:
    trackers = {"tensorboard": {}}
    assert train(spec_document, tmp_path, trackers=trackers, precision={"level": "O2"}) == 0
    first = scalars(tmp_path)
    assert [step for step, _ in first["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in first["evaluation/loss"]] == [2, 4]
    assert {"train/learning_rate", "train/gradient_norm", "train/tokens_per_s", "memory/weights_bytes"} <= set(first)
    assert "fp8/lowest_sqnr_db" in first

    # The newest checkpoint is gone, so the second attempt repeats steps 3 and 4.
    for newest in (tmp_path / "checkpoints").glob("step_*4"):
        newest.rename(tmp_path / "gone")
    assert train(spec_document, tmp_path, "--resume", steps=6, trackers=trackers, precision={"level": "O2"}) == 0
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tracker however busy the machine is: what these packages import takes seconds."""
    monkeypatch.setattr(feed, "CLOSE_S", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.system
def test_mlflow_keeps_one_run_for_all_attempts(spec_document: dict[str, Any], tmp_path: Path) -> None:
    trackers, labels = {"mlflow": {}}, {"comparison": "cmp_1", "arm": "O2"}
    assert train(spec_document, tmp_path, trackers=trackers, labels=labels) == 0
    for newest in (tmp_path / "checkpoints").glob("step_*4"):
        newest.rename(tmp_path / "gone")
    assert train(spec_document, tmp_path, "--resume", steps=6, trackers=trackers, labels=labels) == 0

    client, runs = runs_of(f"sqlite:///{tmp_path / 'trackers' / 'mlflow.db'}")
    assert len(runs) == 1
    run = runs[0]
    assert run.info.status == "FINISHED"
    assert run.data.params["training.optimizer.name"] == "adamw"
    assert run.data.tags["octet.label.comparison"] == "cmp_1"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "evaluation/loss")] == [2, 4, 6]


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a W&B file with W&B's own records; the file is LevelDB's log of them, after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record, rows = file.read_bytes(), 7, b"", []
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, part = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        # A record is whole (1), or this is its last part (4).
        if part in (1, 4):
            parsed, record = Record.FromString(record), b""
            if items := parsed.history.item:
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.usefixtures("patient")
@pytest.mark.system
def test_wandb_writes_one_run_for_all_attempts(spec_document: dict[str, Any], tmp_path: Path) -> None:
    trackers, labels = {"wandb": {}}, {"comparison": "cmp_1"}
    assert train(spec_document, tmp_path, trackers=trackers, labels=labels) == 0
    for newest in (tmp_path / "checkpoints").glob("step_*4"):
        newest.rename(tmp_path / "gone")
    assert train(spec_document, tmp_path, "--resume", steps=6, trackers=trackers, labels=labels) == 0

    files = sorted((tmp_path / "trackers" / "wandb").rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "the attempts have one run id"
    attempts = [wandb_history(file) for file in files]
    assert [[row["_step"] for row in rows if "train/loss" in row] for rows in attempts] == [[1, 2, 3, 4], [5, 6]]
    assert [row["_step"] for rows in attempts for row in rows if "evaluation/loss" in row] == [2, 4, 6]
    assert "memory/weights_bytes" in attempts[0][0]


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def plain_loss(spec_document: dict[str, Any], tmp_path: Path) -> float:
    assert train(spec_document, tmp_path / "plain") == 0
    return loss_of(tmp_path / "plain")


@pytest.mark.system
def test_a_tracker_that_raises_is_logged_once_and_the_job_goes_on(
    spec_document: dict[str, Any],
    tmp_path: Path,
    closed_port: int,
    plain_loss: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    trackers = {"mlflow": {"online": True}, "tensorboard": {}}
    assert train(spec_document, tmp_path, trackers=trackers) == 0
    assert loss_of(tmp_path) == plain_loss
    assert caplog.text.count("tracker mlflow failed and gets nothing more") == 1
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4]


@pytest.mark.system
def test_a_tracker_that_hangs_is_left_at_the_end(
    spec_document: dict[str, Any],
    tmp_path: Path,
    silent_server: int,
    plain_loss: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(feed, "CLOSE_S", 1.0)
    monkeypatch.setattr(feed, "MAX_QUEUED", 2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent_server}")
    # The test ends before the request does: the thread is a daemon's.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    before = set(threading.enumerate())
    caplog.set_level(logging.INFO)
    assert train(spec_document, tmp_path, steps=12, trackers={"mlflow": {"online": True}}) == 0
    assert "tracker mlflow does not end" in caplog.text
    assert caplog.text.count("tracker mlflow is too slow") == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert train(spec_document, tmp_path / "short") == 0
    assert loss_of(tmp_path / "short") == plain_loss


def test_a_missing_package_is_refused_before_the_model_is_built(
    spec_document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octet.worker.reporting.trackers.find_spec", lambda name: None)
    assert train(spec_document, tmp_path, trackers={"mlflow": {}}) == 1
    assert "Install octet-fp8[mlflow] for the ranks" in caplog.text
    assert "model_built" not in caplog.text
