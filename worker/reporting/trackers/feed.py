"""Passes what rank 0 reports on to trackers: TensorBoard files, MLflow, Weights & Biases.

Each tracker has a queue and a thread of its own, so neither training nor another tracker waits for it. A tracker that raises
is logged once and gets nothing more. A tracker that hangs loses rows once its queue is full, and the rank ends without it.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from octet.api_schemas import (
    EvaluationReport,
    FinishedReport,
    JobSpec,
    JsonScalar,
    MeasuredReport,
    ReportBody,
    StartedReport,
    StepReport,
)
from octet.worker.reporting.reporter import Reporter

MAX_QUEUED = 20_000
"""Reports that wait for one tracker. A step is some 500 bytes."""
INTERVAL_S = 1.0
"""The time from one batch of rows to the next."""
CLOSE_S = 30.0
"""The longest that the end of a rank waits for all trackers: MLflow alone takes 10 s to import on a busy machine."""
STOPPED_CLOSE_S = 10.0
"""The same for a rank that was stopped, which is killed after `cancel_grace_s`."""

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """Values of one step, by their names in the tracker."""

    step: int
    at: datetime
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A job as trackers show it. The id is the same in all attempts. folder: for files of trackers."""

    id: str
    name: str
    labels: Mapping[str, str]
    config: Mapping[str, JsonScalar]
    folder: Path

    @classmethod
    def of(cls, run_id: str, spec: JobSpec, folder: Path) -> Self:
        """Return the run of a job. Its config has the job's fields by their paths, with lists as JSON."""
        config = dict(_leaves(spec.model_dump(mode="json", exclude={"labels", "trackers"})))
        return cls(run_id, spec.name, spec.labels, config, folder)


def _leaves(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, JsonScalar]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value) if isinstance(value, list) else value


class Tracker(Protocol):
    """One run in another project's program. Only its feed's thread calls it."""

    def open(self, run: TrackedRun, resumed_from_step: int) -> None:
        """Begin the run, or continue it after that step. Values that an earlier attempt sent are not shown twice."""

    def log(self, rows: Sequence[Row]) -> None:
        """Add rows in the order of their steps."""

    def close(self, ended: FinishedReport | None) -> None:
        """Write what is left and end the run. ended: None if this rank lost its lease, and may not say how the job ended."""


class TrackedReporter:
    """Passes reports on, and queues what trackers show."""

    def __init__(self, reporter: Reporter, trackers: Mapping[str, Tracker], run: TrackedRun) -> None:
        """trackers: by the names that the log has for them."""
        self._reporter = reporter
        self._feeds = [_Feed(name, tracker, run) for name, tracker in trackers.items()]

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        self._reporter.send(body, at)
        if isinstance(body, StartedReport | StepReport | EvaluationReport | MeasuredReport):
            for feed in self._feeds:
                feed.put(body, at or datetime.now(UTC))

    def check(self) -> None:
        self._reporter.check()

    def close(self, ended: FinishedReport | None) -> None:
        """Let the trackers write what is queued. What takes too long is left, with a line in the log.

        ended: see `Tracker.close`. The report itself is sent by the caller, as the last of the attempt.
        """
        was_stopped = ended is None or ended.outcome == "cancelled"
        give_up_at = time.monotonic() + (STOPPED_CLOSE_S if was_stopped else CLOSE_S)
        for feed in self._feeds:
            feed.end(ended)
        for feed in self._feeds:
            feed.wait(max(0.0, give_up_at - time.monotonic()))


class _Feed:
    """The queue and the thread of one tracker."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._queue: deque[tuple[ReportBody, datetime]] = deque()
        self._num_dropped = 0
        self._is_over = False
        self._is_open = False
        self._ended: FinishedReport | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"octet-tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, body: ReportBody, at: datetime) -> None:
        """Queue a report. A full queue drops it, unless it begins the run."""
        if self._is_over:
            return
        if len(self._queue) >= MAX_QUEUED and not isinstance(body, StartedReport):
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("tracker %s is too slow: reports are dropped, and the job goes on", self._name)
            return
        self._queue.append((body, at))

    def end(self, ended: FinishedReport | None) -> None:
        self._ended = ended
        self._ending.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread, and log what the tracker did not get."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("tracker %s does not end; %d reports did not reach it", self._name, len(self._queue))
        if self._num_dropped:
            logger.warning("tracker %s: %d reports were dropped", self._name, self._num_dropped)

    def _work(self) -> None:
        try:
            while not self._is_over:
                # Read before the queue is emptied, so that the last round takes all that was queued before the end.
                self._is_over = self._ending.is_set()
                self._pass_on()
                self._ending.wait(INTERVAL_S)
            if self._is_open:
                self._tracker.close(self._ended)
        except Exception as error:
            self._is_over = True
            self._queue.clear()
            logger.warning("tracker %s failed and gets nothing more; the job goes on: %s", self._name, error, exc_info=error)

    def _pass_on(self) -> None:
        rows: list[Row] = []
        while self._queue:
            body, at = self._queue.popleft()
            if isinstance(body, StartedReport):
                self._tracker.open(self._run, body.resumed_from_step)
                self._is_open = True
            elif self._is_open and (row := _row_of(body, at)) is not None:
                rows.append(row)
        if rows:
            self._tracker.log(rows)


def _row_of(body: ReportBody, at: datetime) -> Row | None:
    """Return what trackers show of a report; values that are not finite are left out."""
    values: dict[str, float | None] = {}
    match body:
        case StepReport():
            values = {
                "train/loss": body.loss,
                "train/gradient_norm": body.gradient_norm,
                "train/learning_rate": body.learning_rate,
                "train/tokens_per_s": body.tokens / body.step_time_s if body.step_time_s > 0 else None,
            }
        case EvaluationReport():
            values = {"evaluation/loss": body.loss} | {f"evaluation/{name}": value for name, value in body.metrics.items()}
        case MeasuredReport():
            values = _measured(body)
        case _:
            return None
    known = {name: float(value) for name, value in values.items() if value is not None}
    return Row(body.step, at, known) if known else None


def _measured(body: MeasuredReport) -> dict[str, float | None]:
    """Return the memory by class, and the worst of what FP8 does to the reported layers."""
    values: dict[str, float | None] = {}
    if body.memory is not None:
        values |= {f"memory/{name}_bytes": num_bytes for name, num_bytes in body.memory.held.items()}
        values |= {"memory/host_bytes": body.memory.host, "memory/peak_bytes": body.memory.peak}
    layers = body.layers or ()
    for name, found, worst in (
        ("fp8/lowest_sqnr_db", [layer.sqnr_db for layer in layers], min),
        ("fp8/largest_overflow_ratio", [layer.overflow_ratio for layer in layers], max),
        ("fp8/largest_underflow_ratio", [layer.underflow_ratio for layer in layers], max),
    ):
        finite = [value for value in found if value is not None]
        values[name] = worst(finite) if finite else None
    return values
