"""A rank's connection to the control plane: an ordered stream of reports out, the lease and the desired state back.

Training never waits for the network: `send` queues a report and one thread delivers it. Steps, evaluations and log lines of
about a second travel in one request; any other report is sent within a quarter of a second and takes them along. While the
control plane is away, the queue grows on disk and training continues until the lease ends. Then `check` raises and the rank
stops itself, because another attempt may be started from then on. This module loads no torch: a rank reports before it has
loaded torch.
"""

import http.client
import logging
import math
import random
import select
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from octet.api_schemas import (
    MAX_REPORTS_PER_BATCH,
    CheckpointReport,
    DesiredState,
    EvaluationReport,
    LaunchOrder,
    LogReport,
    MeasuredReport,
    Report,
    ReportBatch,
    ReportBody,
    ReportReply,
    StepReport,
)
from octet.api_schemas.training import KeepSpec
from octet.worker.common.errors import Cancelled, Fenced, LeaseLost, Stopped
from octet.worker.reporting.spool import Spool

# One HTTP connection to the control plane, kept open from one request to the next. It is http.client's: a request takes the
# rank 0.5 ms of CPU between two steps, and with httpx 1.7 (medians of 60, caches cold).

DEFAULT_PORTS = {"http": 80, "https": 443}
FAILURES = (OSError, http.client.HTTPException)
"""The errors that `Post` raises: nobody answered, or not in HTTP."""


class Answer(NamedTuple):
    """A server's answer."""

    status: int
    content: bytes


Post = Callable[[bytes], Answer]
"""Sends a body of JSON and returns the answer. Raises one of `FAILURES` if there is none."""


class Connection:
    """Posts JSON to one URL. Only one thread uses it. No proxy is used."""

    def __init__(self, url: str, token: str, timeout_s: float, *, ca: str | None = None, name: str | None = None) -> None:
        """token: sent as a bearer token. timeout_s: of each wait for the server.

        ca: the certificates that are trusted with https, as PEM; by default those of this machine's system. name: what the
        server's certificate has to be for, by default the host of the URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"cannot report to {url!r}; allowed: http://… and https://…. Change report_url.")
        self._target = parts.path or "/"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        if parts.scheme == "https":
            self._http = _HttpsConnection(parts.hostname, parts.port, timeout_s, ca, name)

    def post(self, content: bytes) -> Answer:
        """Send a body, as `Post` has it. A connection that the server has closed meanwhile is opened again."""
        if self._http.sock is not None and _has_something_to_read(self._http.sock):
            self._http.close()
        try:
            self._http.request("POST", self._target, content, self._headers)
            response = self._http.getresponse()
            return Answer(response.status, response.read())
        except FAILURES:
            self._http.close()  # a later request must not find what is left of this one
            raise

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


class _HttpsConnection(http.client.HTTPConnection):
    """A connection over TLS whose server may have another name than the address that it is reached by."""

    default_port = DEFAULT_PORTS["https"]

    def __init__(self, host: str, port: int | None, timeout_s: float, ca: str | None, name: str | None) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._tls = ssl.create_default_context(cadata=ca)
        if ca is not None:
            self._tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # one of them may be the server's own
        self._name = name or host

    def connect(self) -> None:
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def _has_something_to_read(connection: socket.socket) -> bool:
    """Return whether the server has sent something, such as the end, without a request."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


FLUSH_INTERVAL_S = 0.25
"""The least time from one request to the next."""
CURVE_INTERVAL_S = 1.0
"""The same, where only the curve and log lines wait: a request takes as long however many steps it carries."""
STEP_LINE_INTERVAL_S = 1.0
"""The least time from one line about a step in the log to the next."""
STEP_LINE_SHARE = 0.01
"""The same, as a share of the time since the first."""
_REQUEST_TIMEOUT_S = 10.0
_BACKOFF_MAX_S = 5.0
_FINAL_DELIVERY_S = 900.0
_FENCED_STATUSES = frozenset({401, 404, 409})

logger = logging.getLogger(__name__)
_STEPS = logging.getLogger(f"{__name__}.steps")  # ReportHandler leaves out what this module itself logs


class Reporter(Protocol):
    """The part of a reporter that the training loop uses."""

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        """Queue a report. at: time of the report, by default now."""

    def check(self) -> None:
        """Raise Cancelled, LeaseLost or Fenced if this rank has to stop."""


def order_to_stop(reporter: Reporter) -> Stopped | None:
    """Return what `check` raises, or None."""
    try:
        reporter.check()
    except Stopped as stop:
        return stop
    return None


class LogReporter:
    """The reporter of a run without a control plane. It logs reports, and nobody can stop the run.

    It also deletes the checkpoints of this run that `keep` does not name, as the control plane does for jobs; those of
    earlier runs, whose evaluations it does not know, stay. folder: of the checkpoints.
    """

    def __init__(self, folder: Path | None = None, keep: KeepSpec | None = None) -> None:
        self._folder, self._keep = folder, keep
        self._names: dict[int, str] = {}
        self._losses: dict[int, float] = {}

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        if isinstance(body, EvaluationReport) and body.loss is not None:
            self._losses[body.step] = body.loss
        elif isinstance(body, CheckpointReport):
            self._names[body.step] = body.name
            self._delete_surplus()
        if not isinstance(body, LogReport | MeasuredReport):
            fields = body if isinstance(body, StepReport) else body.model_dump(exclude_none=True).items()
            told = (f"{name}={value}" for name, value in fields if name != "kind" and value is not None)
            logger.info("%s %s", body.kind, " ".join(told))

    def check(self) -> None:
        return None

    def _delete_surplus(self) -> None:
        if self._folder is not None and self._keep is not None:
            for step in self._keep.surplus(list(self._names), self._losses):
                shutil.rmtree(self._folder / self._names.pop(step), ignore_errors=True)


class StepLines:
    """Passes reports on, and logs steps for people: a line a second, and later one for each hundredth of the time so far.

    A run of a day then has some 800 lines. The control plane gets every step as a report all the same.
    """

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._began_at = self._due_at = clock()
        self._num_tokens = 0
        self._train_time_s = 0.0

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        self._reporter.send(body, at)
        if isinstance(body, StepReport):
            self._num_tokens += body.tokens
            self._train_time_s += body.step_time_s
            if (now := self._clock()) >= self._due_at:
                self._log(body, now)

    def check(self) -> None:
        self._reporter.check()

    def _log(self, step: StepReport, now: float) -> None:
        loss = "not finite" if step.loss is None else f"{step.loss:.4f}"
        speed = self._num_tokens / self._train_time_s if self._train_time_s > 0 else 0.0
        rate = f"learning rate {step.learning_rate:.3g}"
        _STEPS.info("step %d: loss %s, %s, %s tokens/s", step.step, loss, rate, f"{speed:,.0f}")
        self._num_tokens, self._train_time_s = 0, 0.0
        self._due_at = now + max(STEP_LINE_INTERVAL_S, (now - self._began_at) * STEP_LINE_SHARE)


class HttpReporter:
    """Delivers one rank's stream to `POST /internal/v1/attempts/{id}/reports`. Use it as a context manager."""

    def __init__(
        self,
        order: LaunchOrder,
        rank: int,
        *,
        post: Post | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """post: sends a batch, in place of a connection to the control plane."""
        self._order = order
        self._rank = rank
        self._clock = clock
        url = f"{order.report_url.rstrip('/')}/internal/v1/attempts/{order.attempt_id}/reports"
        self._connection = Connection(url, order.token, _REQUEST_TIMEOUT_S, ca=order.report_ca, name=order.report_name)
        self._post = post or self._connection.post
        self._spool = Spool(Path(order.job_dir, "spool", f"{order.attempt_id}_rank{rank}.jsonl"))
        self._last_seq = 0
        self._seq_lock = threading.Lock()
        self._lease_ends = clock() + order.lease_s
        self._desired = DesiredState.RUN
        self._fenced: str | None = None
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_forever, name="octet-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Deliver what is queued, waiting up to 15 minutes for an absent control plane, then close."""
        self._closing.set()
        self._hurry.set()
        self._wake.set()
        self._thread.join()
        self._connection.close()
        self._spool.close()

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        with self._seq_lock:
            self._last_seq += 1
            # Not validated: the body is valid, and validation would take longer than all the rest
            self._spool.append(Report.model_construct(seq=self._last_seq, at=at or datetime.now(UTC), body=body))
        if isinstance(body, LogReport):
            return
        if not isinstance(body, StepReport | EvaluationReport | MeasuredReport):
            self._hurry.set()
        self._wake.set()

    def check(self) -> None:
        if self._fenced is not None:
            raise Fenced(self._fenced)
        if self._desired is not DesiredState.RUN:
            asked = "paused" if self._desired is DesiredState.PAUSE else "cancelled"
            raise Cancelled(f"the job was {asked}", saves=self._desired.saves)
        # Only rank 0 holds the lease. The supervisor ends the other ranks with rank 0.
        if self._rank == 0 and self._clock() > self._lease_ends:
            raise LeaseLost(f"the control plane did not answer for {self._order.lease_s:g} s")

    def _deliver_forever(self) -> None:
        """Send queued reports, and an empty batch as heartbeat. Back off after a failure."""
        failures = 0
        give_up_at = math.inf
        while self._fenced is None:
            if self._closing.is_set():
                give_up_at = min(give_up_at, self._clock() + _FINAL_DELIVERY_S)
                if len(self._spool) == 0 or self._clock() > give_up_at:
                    return
            delivered = self._deliver_once()
            failures = 0 if delivered else failures + 1
            if delivered and self._closing.is_set():
                continue
            self._wait(failures)

    def _wait(self, failures: int) -> None:
        if failures:
            backoff_s = min(_BACKOFF_MAX_S, 0.2 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)
            self._closing.wait(backoff_s) if not self._closing.is_set() else time.sleep(backoff_s)
            return
        if len(self._spool) >= MAX_REPORTS_PER_BATCH:
            return
        self._closing.wait(FLUSH_INTERVAL_S)
        curve_s = min(CURVE_INTERVAL_S - FLUSH_INTERVAL_S, self._order.heartbeat_s)
        if not self._hurry.wait(curve_s):
            self._wake.wait(self._order.heartbeat_s - curve_s)
        self._wake.clear()
        self._hurry.clear()

    def _deliver_once(self) -> bool:
        reports = self._spool.peek(MAX_REPORTS_PER_BATCH)
        batch = ReportBatch(epoch=self._order.epoch, rank=self._rank, reports=tuple(reports))
        sent_at = self._clock()
        try:
            status, content = self._post(batch.model_dump_json().encode())
            if status in _FENCED_STATUSES:
                told = content.decode(errors="replace")[:500]
                self._fenced = f"the control plane refused this attempt: {status} {told}"
                return False
            if not 200 <= status < 300:
                raise ValueError(f"the control plane answered {status}")
            reply = ReportReply.model_validate_json(content)
        except (*FAILURES, ValueError) as error:
            logger.warning("cannot deliver reports, %d are queued: %s", len(self._spool), error)
            return False
        self._lease_ends = sent_at + reply.lease_s
        self._desired = reply.desired
        self._spool.drop(reply.acknowledged_seq)
        return True


class ReportHandler(logging.Handler):
    """Sends log records to the control plane as lines of this rank's log."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        # Warnings about delivery stay on this machine; each would otherwise cause the next.
        if record.name == __name__ or record.name.startswith("http"):
            return
        line = LogReport(level=record.levelname, message=self.format(record)[:16_384])
        self._reporter.send(line, at=datetime.fromtimestamp(record.created, UTC))
