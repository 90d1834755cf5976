"""Jobs and summaries as a server would send them, for tests of what is done with them."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from octet.api_schemas import Job, JobSummary
from octet.client import Client
from tests.client.octet_app import OctetApp

ACCEPTED_AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)

SPEC: dict[str, Any] = {
    "name": "first",
    "model": {"preset": "gpt-tiny"},
    "precision": {"level": "O2"},
    "data": {"path": "/data/corpus"},
    "training": {"steps": 100, "global_batch_size": 4, "sequence_length": 64},
}


@pytest.fixture
def spec() -> dict[str, Any]:
    """A valid job, to be changed freely."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}


@pytest.fixture
def make_summary() -> Callable[..., JobSummary]:
    def make(**changes: Any) -> JobSummary:
        fields: dict[str, Any] = {
            "steps": 100,
            "final_loss": 1.75,
            "evaluation_loss": 2.0,
            "evaluation_perplexity": 7.389,
            "tokens": 25_600,
            "tokens_per_s": 5120.0,
            "train_time_s": 65.4,
            "num_parameters": 1000,
            "num_converted_parameters": 800,
            "memory_bytes": {"weights": 4000, "gradients": 4000, "exp_avg": 4000, "exp_avg_sq": 4000},
            "converted_memory_bytes": {"weights": 3200, "gradients": 3200, "exp_avg": 3200, "exp_avg_sq": 3200},
            "peak_memory_bytes": None,
            "data": {"unigram_entropy_nats": 3.2},
        }
        return JobSummary.model_validate(fields | changes)

    return make


@pytest.fixture
def make_job(spec: dict[str, Any]) -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
        fields: dict[str, Any] = {
            "id": "job_0123456789abcdefghjkmnpqrs",
            "name": "first",
            "state": "running",
            "desired_state": "run",
            "priority": 50,
            "labels": {},
            "created_at": ACCEPTED_AT,
            "started_at": None,
            "finished_at": None,
            "reason": None,
            "message": None,
            "hint": None,
            "num_attempts": 1,
            "num_failures": 0,
            "current_attempt_id": None,
            "queue": None,
            "progress": None,
            "start": {
                "accepted_at": ACCEPTED_AT,
                "placed_at": ACCEPTED_AT + timedelta(seconds=0.25),
                "first_step_at": ACCEPTED_AT + timedelta(seconds=3.5),
            },
            "summary": None,
            "spec": spec,
        }
        return Job.model_validate(fields | changes)

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with text in it."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        (folder / f"part_{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return str(folder)


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OctetApp]:
    """One server for all tests; each makes jobs of its own."""
    with OctetApp(tmp_path_factory.mktemp("octet")) as running:
        yield running


@pytest.fixture
def client(app: OctetApp) -> Iterator[Client]:
    with Client(app.url) as connected:
        yield connected


@pytest.fixture
def runnable(spec: dict[str, Any], corpus: str) -> dict[str, Any]:
    """A spec whose data exists."""
    return spec | {"data": {"path": corpus}}
