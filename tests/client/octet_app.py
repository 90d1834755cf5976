"""The real application on a real port, and a rank that reports to it as a worker does, without a cluster."""

import hashlib
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from octet.api_schemas import FinishedReport, PhaseReport, Report, ReportBatch, ReportBody, StartedReport, StepReport
from octet.service import store
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.jobs import attempts
from octet.service.jobs.lifecycle import AttemptEvent, next_attempt_state
from octet.service.settings import Settings

API_KEY = "a-key-of-the-tests"
TOKEN = "token-of-the-attempt"


class OctetApp:
    """Serves in a thread; nobody places jobs but `start_rank`."""

    def __init__(self, data_dir: Path, port: int = 0, **settings: Any) -> None:
        self.settings = Settings(data_dir=data_dir, **settings)
        self.database = Database(self.settings.effective_database_url)
        app = create_app(self.settings, database=self.database)
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> "OctetApp":
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            assert self._thread.is_alive(), "the server did not start"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.database.close()

    def start_rank(self, job_id: str) -> "Rank":
        """Place and launch a queued job as the dispatcher would."""
        with self.database.write() as session:
            job = store.jobs.lock_job(session, job_id)
            assert job is not None
            attempt = attempts.reserve(session, job, self.database.now(session))
            attempt.token_hash = hashlib.sha256(TOKEN.encode()).digest()
            attempt.state = next_attempt_state(attempt.state, AttemptEvent.CLAIM)
            return Rank(f"{self.url}/internal/v1/attempts/{attempt.id}/reports", attempt.epoch)


class Rank:
    """Rank 0 of one attempt."""

    def __init__(self, url: str, epoch: int) -> None:
        self._url = url
        self._epoch = epoch
        self._seq = 0

    def report(self, *bodies: ReportBody) -> None:
        first = self._seq + 1
        now = datetime.now(UTC)
        reports = tuple(Report(seq=seq, at=now, body=body) for seq, body in enumerate(bodies, start=first))
        self._seq += len(reports)
        batch = ReportBatch(epoch=self._epoch, rank=0, reports=reports)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        answer = httpx.post(self._url, content=batch.model_dump_json(), headers=headers, trust_env=False)
        assert answer.status_code == 200, answer.text

    def train(self, steps: int) -> None:
        """Start, and report steps whose loss falls from 3."""
        self.report(
            *(PhaseReport(phase=phase) for phase in ("placed", "process_up", "torch_imported", "model_built")),
            StartedReport(
                resumed_from_step=0,
                node="node-1",
                device="cpu",
                world_size=1,
                num_parameters=1000,
                num_layers_converted=4,
                num_layers_skipped=1,
            ),
            PhaseReport(phase="first_step"),
            *(step_report(step) for step in range(1, steps + 1)),
        )

    def succeed(self, summary: Any) -> None:
        self.report(FinishedReport(outcome="succeeded", summary=summary))


def step_report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=3.0 - step / 100,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens=256,
        step_time_s=0.05,
        data_wait_s=0.001,
    )
