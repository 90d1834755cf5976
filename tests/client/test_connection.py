"""The client when the network or the server fails. The server's own behaviour is tested in test_api."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from octet.api_schemas import Job, Page
from octet.client import ApiError, Client, ConnectionFailed, UnexpectedAnswer, WaitTimeout
from octet.client.connection import delays_s

MakeJob = Callable[..., Job]
Handler = Callable[[httpx.Request], httpx.Response]
URL = "http://octet.test"


def client_of(handler: Handler, patience_s: float = 0.3) -> Client:
    return Client(URL, patience_s=patience_s, reconnect_s=patience_s, transport=httpx.MockTransport(handler))


def problem(status: int, **changes: Any) -> httpx.Response:
    body = {"title": "No", "status": status, "detail": "It is not so.", "code": "internal", "errors": []} | changes
    return httpx.Response(status, content=json.dumps(body), headers={"content-type": "application/problem+json"})


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def test_an_absent_server_is_named_with_what_to_do() -> None:
    with pytest.raises(ConnectionFailed, match=rf"{URL}: connection refused.\n.*octet serve") as failed:
        client_of(refuse, patience_s=0).job("job_1")
    assert failed.value.url == URL


def test_a_429_is_sent_again_after_the_time_that_it_names(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("octet.client.connection.time.sleep", slept.append)
    too_many = problem(429, code="too_many_requests")
    too_many.headers["Retry-After"] = "7"
    answers = [too_many, too_many, httpx.Response(200, content=make_job().model_dump_json())]
    assert client_of(lambda _: answers.pop(0)).job("job_1").name == "first"
    assert slept == [7.0, 7.0]


def test_a_429_that_stays_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octet.client.connection.time.sleep", lambda _: None)
    with pytest.raises(ApiError, match="It is not so") as refused:
        client_of(lambda _: problem(429, code="too_many_requests")).job("job_1")
    assert refused.value.problem.status == 429


TOO_SLOW = httpx.Response(408, text="the head of the request did not arrive in time")
LOST = [httpx.ConnectError("x"), httpx.ReadTimeout("x"), httpx.RemoteProtocolError("x")]


@pytest.mark.parametrize("failure", [*LOST, TOO_SLOW, problem(500), problem(503)], ids=str)
def test_a_submission_is_sent_again_under_the_same_key(
    make_job: Callable[..., Any], failure: httpx.TransportError | httpx.Response
) -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            if isinstance(failure, httpx.Response):
                return failure
            raise failure
        return httpx.Response(201, content=make_job().model_dump_json())

    assert client_of(handler).submit(make_job().spec).name == "first"
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_each_submission_has_a_key_of_its_own(make_job: Callable[..., Any]) -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(201, content=make_job().model_dump_json())

    client = client_of(handler)
    for key in (None, None, "mine"):
        client.submit({}, key)
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


def test_a_refusal_is_not_repeated_and_says_what_to_change() -> None:
    calls = itertools.count()
    violation = {"field": "training.steps", "got": "0", "allowed": "at least 1", "message": "Change training.steps."}

    def handler(request: httpx.Request) -> httpx.Response:
        next(calls)
        return problem(422, code="invalid_request", errors=[violation])

    with pytest.raises(ApiError) as refused:
        client_of(handler).submit({})
    assert next(calls) == 1
    assert str(refused.value).splitlines() == [
        "the server refuses it: 1 field to change. [invalid_request]",
        "  training.steps",
        "    got:     0",
        "    allowed: at least 1",
        "    change:  Change training.steps.",
    ]


def test_one_who_stays_too_slow_is_told_so() -> None:
    with pytest.raises(UnexpectedAnswer, match=r"408 .*did not arrive in time"):
        client_of(lambda _: TOO_SLOW, patience_s=0.1).job("job_1")


def test_the_last_5xx_is_shown_as_the_server_put_it() -> None:
    with pytest.raises(ApiError, match="The database is away") as failed:
        client_of(lambda _: problem(503, code="not_ready", detail="The database is away."), patience_s=0.1).job("job_1")
    assert failed.value.problem.status == 503


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>welcome</html>"),
        httpx.Response(200, json={"id": "job_1"}),
        httpx.Response(200, json=["no", "object"]),
        httpx.Response(404, text="not here"),
        httpx.Response(302, headers={"location": "http://elsewhere.test/"}),
        httpx.Response(400, text="{}", headers={"content-type": "application/problem+json"}),
    ],
)
def test_another_kind_of_server_is_recognised(answer: httpx.Response) -> None:
    with pytest.raises(UnexpectedAnswer, match=r"GET http://octet.test/v1/jobs/job_1 answered \d+"):
        client_of(lambda _: answer).job("job_1")


def test_fields_of_a_newer_server_are_dropped(make_job: Callable[..., Any]) -> None:
    document = json.loads(make_job().model_dump_json()) | {"colour": "blue"}
    document["spec"]["training"]["phase_of_the_moon"] = "full"
    assert client_of(lambda _: httpx.Response(200, json=document)).job("job_1") == make_job()


def test_an_id_cannot_leave_its_place_in_the_path() -> None:
    paths: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return problem(404, code="not_found")

    with pytest.raises(ApiError):
        client_of(handler).job("job_1/cancel?x#y")
    assert paths == [b"/v1/jobs/job_1%2Fcancel%3Fx%23y"]


def test_the_key_is_sent_and_never_shown() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret-of-the-key"
        return problem(401, code="unauthenticated")

    client = Client(URL, "secret-of-the-key", transport=httpx.MockTransport(handler))
    with pytest.raises(ApiError) as refused:
        client.job("job_1")
    assert "secret-of-the-key" not in str(refused.value) + repr(client)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "", "http://[::1"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Client(url)


def test_waiting_ends_with_the_patience_of_the_caller(make_job: Callable[..., Any]) -> None:
    seen: list[str] = []
    client = client_of(lambda _: httpx.Response(200, content=make_job().model_dump_json()))
    with pytest.raises(WaitTimeout, match=r"still running after 0\.05 s") as ended:
        client.wait("job_1", 0.05, lambda job: seen.append(job.state), poll_s=0.01)
    assert isinstance(ended.value, TimeoutError)
    assert seen == ["running"]  # it did not change, so it was shown once


def test_waiting_outlives_an_absent_server(make_job: Callable[..., Any]) -> None:
    answers = iter(["running", None, None, "succeeded"])

    def handler(request: httpx.Request) -> httpx.Response:
        state = next(answers)
        return refuse(request) if state is None else httpx.Response(200, content=make_job(state=state).model_dump_json())

    client = Client(URL, patience_s=0, reconnect_s=2, transport=httpx.MockTransport(handler))
    assert client.wait("job_1", poll_s=0).state == "succeeded"


class Stream(httpx.SyncByteStream):
    """Chunks of an event stream; an exception among them breaks the connection there."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self.chunks = chunks

    def __iter__(self) -> Any:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


def event(seq: int) -> bytes:
    body = {
        "id": f"evt_{seq}",
        "job_id": "job_1",
        "seq": seq,
        "at": "2026-01-31T12:00:00Z",
        "type": "job.changed",
        "attempt_id": None,
        "message": "\u2028",
        "data": {},
    }
    return f"id: {seq}\nevent: event\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def test_a_broken_stream_goes_on_after_the_last_whole_event(make_job: Callable[..., Any]) -> None:
    cut = event(3)[:20]
    streams = [
        Stream(event(1), event(2), cut, httpx.ReadError("reset")),
        httpx.ConnectError("restarting"),
        Stream(b": keep-alive\n\n", event(3)),  # ended cleanly: the server was stopped, or the job is over
        Stream(event(4)),
        Stream(),
    ]
    states = iter(["running", "succeeded", "succeeded"])
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.headers["Accept"] != "text/event-stream":
            return httpx.Response(200, content=make_job(state=next(states)).model_dump_json())
        asked.append(request.headers.get("Last-Event-ID"))
        stream = streams.pop(0)
        if isinstance(stream, Exception):
            raise stream
        return httpx.Response(200, stream=stream)

    assert [found.seq for found in client_of(handler, patience_s=1).events("job_1", follow=True)] == [1, 2, 3, 4]
    assert asked == [None, "2", "2", "3", "4"]
    assert next(states) == "succeeded"  # one state was left: the last stream was opened after the end, and nothing was asked


def test_a_stream_that_never_comes_back_is_given_up() -> None:
    streams = [Stream(event(1), httpx.ReadError("reset"))]

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=streams.pop(0)) if streams else refuse(request)

    following = client_of(handler, patience_s=0.2).events("job_1", follow=True)
    assert next(following).seq == 1
    with pytest.raises(ConnectionFailed):
        next(following)


def test_a_stream_of_an_unknown_job_is_refused_at_once() -> None:
    with pytest.raises(ApiError, match="It is not so"):
        next(client_of(lambda _: problem(404, code="not_found")).logs("job_1", follow=True))


def test_a_stream_of_something_else_is_recognised() -> None:
    stream = Stream(b"data: {}\n\n")
    with pytest.raises(UnexpectedAnswer, match="no LogLine"):
        next(client_of(lambda _: httpx.Response(200, stream=stream)).logs("job_1", follow=True))


def test_delays_grow_and_add_up_to_the_patience() -> None:
    delays = list(delays_s(30.0))
    assert sum(delays) == pytest.approx(30.0, abs=0.01)
    assert delays[0] <= 0.1
    assert max(delays) <= 2.0
    assert list(delays_s(0)) == []


@pytest.mark.parametrize("last", ["0", "a", "h", "z"])
@pytest.mark.parametrize("num_left_out", [1, 2])
def test_a_job_is_found_by_a_beginning_of_any_id(make_job: MakeJob, last: str, num_left_out: int) -> None:
    """A list begins below `after`, so that a job whose id ends with the last digit is not in the list after that id."""
    wanted = f"job_01kg9ys7g0zn9d2mqxrybeyj{last}z"
    jobs = [make_job(id=id_) for id_ in ("job_01kg9ys7g0zn9d2mqxrybeyk00", wanted, "job_01kg9ys7g0zn9d2mqxrybeyhzz")]

    def list_jobs(request: httpx.Request) -> httpx.Response:
        after = request.url.params.get("after", "job_z")
        found = () if "name" in request.url.params else tuple(job for job in jobs if job.id < after)
        return httpx.Response(200, content=Page[Job](data=found, has_more=False, first_id=None, last_id=None).model_dump_json())

    found = client_of(list_jobs).find(wanted[:-num_left_out])
    assert found is not None
    assert found.id == wanted
