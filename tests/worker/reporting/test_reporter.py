"""A rank's connection to the control plane: order, delivery after an outage, the lease, cancellation, fencing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octet.api_schemas import (
    CheckpointReport,
    DesiredState,
    EvaluationReport,
    EventReport,
    JobSpec,
    LaunchOrder,
    LogReport,
    PoolConfig,
    Report,
    ReportBatch,
    ReportReply,
    StepReport,
)
from octet.api_schemas.training import KeepSpec
from octet.worker.common.errors import Cancelled, Fenced, LeaseLost
from octet.worker.reporting import reporter as module
from octet.worker.reporting.reporter import Answer, HttpReporter, LogReporter
from tests.kit.waiting import LONG_S, wait_until


class ControlPlane:
    """A control plane for the reporter: applies batches in order, and can be away, cancel, or fence."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.batches: list[list[str]] = []
        """The kinds of the reports in each request that had any."""
        self.away = False
        self.status = 200
        self.desired = DesiredState.RUN
        self.lose_next_reply = False
        self.heard = threading.Event()
        self.refused = threading.Event()

    def __call__(self, content: bytes) -> Answer:
        if self.away:
            self.refused.set()
            raise ConnectionRefusedError("connection refused")
        if self.status != 200:
            return Answer(self.status, b"no")
        batch = ReportBatch.model_validate_json(content)
        self.batches += [[report.body.kind for report in batch.reports]] if batch.reports else []
        last_seq = self.reports[-1].seq if self.reports else 0
        new = [report for report in batch.reports if report.seq > last_seq]
        assert [report.seq for report in new] == list(range(last_seq + 1, last_seq + 1 + len(new)))
        self.reports += new
        self.heard.set()
        if self.lose_next_reply:
            self.lose_next_reply = False
            raise TimeoutError("the reply was lost")
        last_seq = self.reports[-1].seq if self.reports else 0
        reply = ReportReply(desired=self.desired, lease_s=60, acknowledged_seq=last_seq)
        return Answer(200, reply.model_dump_json().encode())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def control_plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def order(tmp_path: Path, spec_document: dict[str, object]) -> LaunchOrder:
    return LaunchOrder(
        attempt_id="att_" + "0" * 26,
        job_id="job_" + "0" * 26,
        epoch=1,
        token="secret",
        spec=JobSpec.model_validate(spec_document),
        pool=PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=1),
        report_url="http://control-plane.test",
        job_dir=str(tmp_path),
        checkpoints=(),
        lease_s=60,
        heartbeat_s=0.02,
    )


@pytest.fixture
def reporter(order: LaunchOrder, control_plane: ControlPlane, clock: Clock) -> Iterator[HttpReporter]:
    with HttpReporter(order, 0, post=control_plane, clock=clock) as running:
        yield running
        control_plane.away, control_plane.status = False, 200


def send_lines(reporter: HttpReporter, count: int) -> None:
    for number in range(count):
        reporter.send(LogReport(level="INFO", message=str(number)))


def test_reports_arrive_in_order_and_once_though_a_reply_was_lost(reporter: HttpReporter, control_plane: ControlPlane) -> None:
    control_plane.lose_next_reply = True
    send_lines(reporter, 2500)
    wait_until(lambda: len(control_plane.reports) == 2500)
    assert [report.seq for report in control_plane.reports] == list(range(1, 2501))


def test_nothing_is_lost_while_the_control_plane_is_away(reporter: HttpReporter, control_plane: ControlPlane) -> None:
    control_plane.away = True
    send_lines(reporter, 6000)
    reporter.check()
    control_plane.away = False
    wait_until(lambda: len(control_plane.reports) == 6000)


def test_a_rank_that_is_not_heard_for_its_lease_stops(
    reporter: HttpReporter, control_plane: ControlPlane, clock: Clock
) -> None:
    assert control_plane.heard.wait(LONG_S)
    control_plane.away = True
    assert control_plane.refused.wait(LONG_S), "a request that was already on its way may have renewed the lease"
    clock.now += 61
    with pytest.raises(LeaseLost):
        reporter.check()


def test_heartbeats_renew_the_lease(reporter: HttpReporter, control_plane: ControlPlane, clock: Clock) -> None:
    for _ in range(4):
        clock.now += 40
        control_plane.heard.clear()
        assert control_plane.heard.wait(LONG_S)
        control_plane.heard.clear()
        assert control_plane.heard.wait(LONG_S)
        reporter.check()


def test_cancellation_arrives_with_a_reply(reporter: HttpReporter, control_plane: ControlPlane) -> None:
    control_plane.desired = DesiredState.CANCEL

    def cancelled() -> bool:
        try:
            reporter.check()
        except Cancelled:
            return True
        return False

    wait_until(cancelled)


@pytest.mark.parametrize("status", [401, 404, 409])
def test_a_fenced_rank_writes_no_more(reporter: HttpReporter, control_plane: ControlPlane, status: int) -> None:
    control_plane.status = status

    def fenced() -> bool:
        try:
            reporter.check()
        except Fenced:
            return True
        return False

    wait_until(fenced)
    control_plane.status = 200
    num_before = len(control_plane.reports)
    send_lines(reporter, 10)
    wait_until(lambda: "octet-report" not in {thread.name for thread in threading.enumerate()})
    assert len(control_plane.reports) == num_before


def send_steps(reporter: HttpReporter, count: int) -> None:
    for step in range(1, count + 1):
        reporter.send(
            StepReport(step=step, loss=1.0, gradient_norm=1.0, learning_rate=0.1, tokens=1, step_time_s=1.0, data_wait_s=0.0)
        )


@pytest.fixture
def steady(order: LaunchOrder, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpReporter]:
    """A reporter without heartbeats that has reported its start and waits for steps."""
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)
    order = order.model_copy(update={"heartbeat_s": 3600.0})
    with HttpReporter(order, 0, post=control_plane) as running:
        assert control_plane.heard.wait(LONG_S)
        yield running


def test_steps_wait_for_each_other_and_whatever_somebody_acts_upon_takes_them_along(
    steady: HttpReporter, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CURVE_INTERVAL_S", 3600.0)
    steady.send(EventReport(type="a.first", message="from here on the interval is an hour"))
    wait_until(lambda: control_plane.batches == [["event"]])
    send_steps(steady, 20)
    steady.send(EventReport(type="an.event", message="now"))
    wait_until(lambda: len(control_plane.reports) == 22)
    assert control_plane.batches[1:] == [["step"] * 20 + ["event"]]


def test_steps_alone_are_sent_when_the_interval_is_over(
    steady: HttpReporter, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CURVE_INTERVAL_S", 0.01)
    steady.send(EventReport(type="a.first", message="from here on the interval is a hundredth of a second"))
    send_steps(steady, 20)
    wait_until(lambda: len(control_plane.reports) == 21)


def test_the_end_waits_for_no_interval(
    steady: HttpReporter, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CURVE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 3600.0)
    send_steps(steady, 3)
    steady.__exit__(None, None, None)
    assert [report.seq for report in control_plane.reports] == [1, 2, 3]


def test_a_run_without_a_service_keeps_the_checkpoints_that_its_job_names(tmp_path: Path) -> None:
    """A checkpoint of an earlier run stays, whatever it was."""
    reporter = LogReporter(tmp_path, KeepSpec(last=2, best=1))
    (tmp_path / "step_0000000001").mkdir()
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.6), start=2):
        name = f"step_{step:010}"
        (tmp_path / name).mkdir()
        reporter.send(EvaluationReport(step=step, loss=loss, tokens=8))
        reporter.send(CheckpointReport(step=step, name=name, num_bytes=1, sha256="0" * 64, loss=loss))
    assert sorted(int(folder.name[5:]) for folder in tmp_path.iterdir()) == [1, 3, 5, 6]
