"""Customers of a server under a storm: they submit small jobs with idempotency keys, and wait for them.

Some jobs they cancel, and some of these they retry; others they pause and resume. Some are more urgent than others, which make
way for them.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octet.api_schemas import Job, JobState
from octet.client import ApiError, Client
from tests.kit.waiting import LONG_S

_NUM_IN_FLIGHT = 3  # on two slots, so that one waits in the queue
_POLL_S = 1.0
_CANCELLED_SHARE, _RETRIED_SHARE, _PAUSED_SHARE = 0.1, 0.15, 0.25
_TWO_RANKS_SHARE, _URGENT_SHARE = 0.25, 0.3


def corpus(folder: Path) -> Path:
    """Write four text files below `folder` and return their folder."""
    place = folder / "corpus"
    place.mkdir()
    for number in range(4):
        lines = [f"line {line} of file {number}: the quick brown fox" for line in range(200)]
        (place / f"part_{number}.txt").write_text("\n".join(lines))
    return place


def job_document(text: Path, *, steps: int = 200, workers: int = 1) -> dict[str, Any]:
    """Describe a job of some seconds that saves often, and goes on however often it loses a rank."""
    return {
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
        "precision": {"level": "fp32"},
        "data": {"source": "text", "path": str(text)},
        "training": {
            "steps": steps,
            "global_batch_size": 8,
            "sequence_length": 64,
            "eval_every": 100,
            "eval_batches": 2,
            "checkpoint_every": 20,
            "seed": 1,
        },
        "resources": {"workers": workers},
        "retry": {"max_failures": 1000},
    }


@dataclass
class Customers:
    """A thread that keeps some jobs in flight until `finish`. It uses a client of its own."""

    url: str
    text: Path
    random: random.Random
    api_key: str | None = None
    accepted: dict[str, str] = field(default_factory=dict)
    """The id that the API gave for each idempotency key, which is the job's name too."""
    num_ended: int = 0
    _is_last_call: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None
    _documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="customers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def finish(self, timeout_s: float) -> bool:
        """Submit nothing more, and wait for the jobs in flight. Returns False if some have not ended by then."""
        self._is_last_call.set()
        self._thread.join(timeout_s)
        self.check()
        return not self._thread.is_alive()

    def submit_again(self) -> list[str]:
        """Repeat every submission with its key; return the keys whose answer is another job than before."""
        with Client(self.url, self.api_key, patience_s=LONG_S) as client:
            return [
                key
                for key, document in self._documents.items()
                if client.submit(document, idempotency_key=key).id != self.accepted[key]
            ]

    def _run(self) -> None:
        try:
            with Client(self.url, self.api_key, patience_s=LONG_S) as client:
                self._serve_themselves(client)
        except BaseException as error:  # noqa: BLE001  (`check` raises it in the main thread)
            self._failure = error

    def _serve_themselves(self, client: Client) -> None:
        in_flight: list[str] = []
        while in_flight or not self._is_last_call.is_set():
            while len(in_flight) < _NUM_IN_FLIGHT and not self._is_last_call.is_set():
                in_flight.append(self._submit(client).id)
            ended = [job_id for job_id in in_flight if client.job(job_id).state.is_terminal]
            in_flight = [job_id for job_id in in_flight if job_id not in ended]
            self.num_ended += len(ended)
            time.sleep(_POLL_S)

    def _submit(self, client: Client) -> Job:
        key = f"storm-{len(self._documents)}"
        workers = 2 if self.random.random() < _TWO_RANKS_SHARE else 1
        priority = 1 if self.random.random() < _URGENT_SHARE else 0
        document: Mapping[str, Any] = job_document(self.text, workers=workers) | {"name": key, "priority": priority}
        self._documents[key] = dict(document)
        job = client.submit(document, idempotency_key=key)
        self.accepted[key] = job.id
        draw = self.random.random()
        if draw < _CANCELLED_SHARE:
            self._later(client.cancel, job.id)
        elif draw < _CANCELLED_SHARE + _RETRIED_SHARE:
            self._stop_and_go_on(client, job.id, client.cancel, client.retry)
        elif draw < _CANCELLED_SHARE + _RETRIED_SHARE + _PAUSED_SHARE:
            self._stop_and_go_on(client, job.id, client.pause, client.resume)
        return job

    def _stop_and_go_on(self, client: Client, job_id: str, stop: Callable[[str], Job], go_on: Callable[[str], Job]) -> None:
        """Stop a job that trains, wait until its processes have ended, and let it go on."""
        self._wait_while(client, job_id, JobState.QUEUED, JobState.STARTING)
        self._later(stop, job_id, longest_s=2.0)
        self._wait_while(client, job_id, JobState.PAUSING, JobState.CANCELLING)
        self._later(go_on, job_id)

    def _wait_while(self, client: Client, job_id: str, *states: JobState) -> None:
        while client.job(job_id).state in states:
            time.sleep(0.1)

    def _later(self, command: Callable[[str], Job], job_id: str, longest_s: float = 10.0) -> None:
        """Give a command after a random while. A job that it no longer fits is left as it is."""
        time.sleep(self.random.uniform(0, longest_s))
        try:
            command(job_id)
        except ApiError as error:
            if error.problem.status != 409:
                raise
