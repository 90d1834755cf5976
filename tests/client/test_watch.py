"""Progress on a terminal and on a pipe, while the job waits, runs, and its server is away."""

import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from rich.text import Text

from octet.api_schemas import Event, Job, Page
from octet.api_schemas.curve import Curve, CurveEvaluations
from octet.api_schemas.measured import Measurements, MemoryBytes
from octet.client import ApiError, Client, ConnectionFailed
from octet.client.terminal import Terminal
from octet.client.watch import watch

MakeJob = Callable[..., Job]
AT = "2026-01-31T12:00:00Z"
SEEN = {"step": 40, "steps": 100, "loss": 2.5, "tokens_per_s": 5120.0, "remaining_s": 61.0, "reported_at": AT}


_LOSSES = (3.0, 2.5, None, 2.25)
_ONES = (1, 1, 1, 1)
CURVE = Curve(
    job_id="job_1", step_by=1, first_step=1, last_step=4, has_more=False, cursor="", step=(1, 2, 3, 4), at=(1.0,) * 4,
    num_steps=_ONES, num_not_finite=_ONES, loss=_LOSSES, loss_least=_LOSSES, loss_greatest=_LOSSES, gradient_norm=_LOSSES,
    gradient_norm_greatest=_LOSSES, learning_rate=_LOSSES, tokens=_ONES, step_time_s=(1.0,) * 4, data_wait_s=(0.0,) * 4,
    evaluations=CurveEvaluations(step=(), loss=(), loss_least=(), loss_greatest=(), metrics={}),
)  # fmt: skip
MEASURED = Measurements(
    job_id="job_1", attempt_id="att_1", at=datetime(2026, 1, 31, tzinfo=UTC), step=1, num_parameters=1000,
    num_layers_converted=4, num_layers_filtered=0, num_layers_skipped=1, layers=None,
    memory=MemoryBytes(held={"weights": 2_000_000, "gradients": 1_000_000, "scales": 0}, fp32={"weights": 12_000_000},
                       host=0, peak=None),
)  # fmt: skip


class Screen(io.StringIO):
    """A standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def event(seq: int, message: str) -> Event:
    fields = {"id": f"evt_{seq}", "job_id": "job_1", "seq": seq, "at": AT, "type": "job.changed"}
    return Event.model_validate(fields | {"attempt_id": None, "message": message, "data": {}})


@pytest.fixture
def turns(make_job: MakeJob) -> list[tuple[Job, list[Event]] | None]:
    """The server's job and new events at each turn; None while the server is away."""
    waiting = make_job(state="queued", queue={"position": 1, "why": "no slot is free"})
    running = make_job(progress=SEEN)
    done = make_job(state="succeeded", progress=SEEN | {"step": 100})
    return [(waiting, [event(1, "accepted")]), (running, []), None, None, (done, [event(2, "\x1b[2Jdone")])]


def client_of(turns: list[tuple[Job, list[Event]] | None]) -> Client:
    script: Iterator[tuple[Job, list[Event]] | None] = iter(turns)
    events: list[Event] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/curve"):
            return httpx.Response(200, content=CURVE.model_dump_json())
        if request.url.path.endswith("/measurements"):
            return httpx.Response(200, content=MEASURED.model_dump_json())
        if request.url.path.endswith("/events"):
            after = int(request.url.params.get("after", "0"))
            later = tuple(event for event in events if event.seq > after)
            page = Page[Event](data=later, has_more=False, first_id=None, last_id=None)
            return httpx.Response(200, content=page.model_dump_json())
        turn = next(script)
        if turn is None:
            raise httpx.ConnectError("refused", request=request)
        events.extend(turn[1])
        return httpx.Response(200, content=turn[0].model_dump_json())

    return Client("http://octet.test", patience_s=0, transport=httpx.MockTransport(handler))


def run_watch(turns: Any, **options: Any) -> list[Job]:
    return watch(client_of(turns), ["job_0123456789abcdefghjkmnpqrs"], Terminal(), **({"poll_s": 0} | options))


def test_a_pipe_gets_plain_lines(turns: Any, capsys: pytest.CaptureFixture[str]) -> None:
    [job] = run_watch(turns)
    assert job.state == "succeeded"
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("first  job.changed: accepted")
    assert shown[1] == "first  queued  no slot is free"
    assert shown[2] == "first  running  step 40/100, loss 2.5000, 5,120 tokens/s, 1:01 left"
    assert shown[3].startswith("the server does not answer; the jobs go on.")
    assert shown[4].endswith("first  job.changed: \\x1b[2Jdone")
    assert shown[5] == "first  succeeded  step 100/100, loss 2.5000, 5,120 tokens/s"
    assert len(shown) == 6  # an event is shown once, and so is the absence
    assert not any("\x1b" in line or "\r" in line for line in shown)


def test_a_terminal_gets_a_row_that_moves(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    run_watch(turns)
    text = screen.getvalue()
    assert "\x1b[" in text
    assert "\x1b[2J" not in text
    assert "100/100" in text
    assert "job.changed: accepted" in text
    assert "first holds 3 MB, 25% of fp32's 12 MB: weights 2 MB, gradients 1 MB" in text
    assert "loss by step" in text
    assert "⢕⢕" in text


def test_a_screen_of_80_columns_and_24_lines_shows_all_and_wraps_nothing(
    turns: Any, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    job = make_job(name="n" * 90, state="succeeded", progress=SEEN | {"step": 100_000, "steps": 100_000, "tokens_per_s": 1e7})
    watch(client_of([(job, [])] * 2), [job.id, job.id], Terminal(), poll_s=0)
    shown = Text.from_ansi(screen.getvalue().replace("\r", "")).plain.splitlines()
    assert max(map(len, shown)) <= 80
    assert len(shown) <= 24
    assert sum("100000/100000" in line for line in shown) == 2
    assert any("loss by step" in line for line in shown)


def test_a_terminal_without_room_for_a_chart_shows_rows_and_memory(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "12")):
        monkeypatch.setenv(name, value)
    run_watch(turns)
    assert "loss by step" not in screen.getvalue()
    assert "first holds 3 MB" in screen.getvalue()


def test_an_absence_that_lasts_ends_the_watch(turns: Any) -> None:
    with pytest.raises(ConnectionFailed):
        run_watch([turns[0], None], reconnect_s=0)


def test_a_refusal_ends_the_watch_at_once() -> None:
    body = '{"title": "No", "status": 404, "detail": "There is no such job.", "code": "not_found"}'
    answer = httpx.Response(404, content=body, headers={"content-type": "application/problem+json"})
    client = Client("http://octet.test", transport=httpx.MockTransport(lambda _: answer))
    with pytest.raises(ApiError, match="no such job"):
        watch(client, ["job_1"], Terminal(), poll_s=0)


def test_the_callers_check_ends_the_watch(turns: Any) -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    with pytest.raises(Gone):
        run_watch(turns, check=check)


def test_progress_on_a_pipe_is_a_line_now_and_then(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(make_job(progress=SEEN | {"step": step}), []) for step in range(1, 50)]
    run_watch([*steps, (make_job(state="succeeded", progress=SEEN), [])])
    assert len(capsys.readouterr().out.splitlines()) == 2
