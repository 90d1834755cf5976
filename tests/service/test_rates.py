"""The requests of each principal are limited by what they cost."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from octet.api_schemas import ErrorCode, JobSpec
from octet.service.access.principal import Principal, of_key_file
from octet.service.access.rates import Rates, cost_of
from octet.service.app import create_app
from octet.service.errors import ServiceError, TooManyRequests
from octet.service.http.bodies import MAX_BODY_BYTES, read_json
from octet.service.settings import Settings
from tests.service.databases import ON_SQLITE
from tests.service.test_jobs_api import problem_of
from tests.service.world import World

Document = dict[str, Any]
GREEDY, MODEST = of_key_file("greedy"), of_key_file("modest")


class SecondsClock:
    """Seconds that are turned by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def number_allowed(rates: Rates, cost: float) -> int:
    """Charge until a request is refused, and return how many were not."""
    for number in range(100_000):
        try:
            rates.charge(GREEDY, cost)
        except TooManyRequests:
            return number
    raise AssertionError("nothing was refused")


def test_a_bucket_is_filled_by_time_up_to_two_seconds_worth() -> None:
    clock = SecondsClock()
    rates = Rates(100, clock)
    assert number_allowed(rates, 1) == 200
    clock.now_s += 0.5
    assert number_allowed(rates, 1) == 50
    clock.now_s += 3600
    assert number_allowed(rates, 1) == 200


def test_a_refusal_says_when_there_is_enough_and_takes_nothing() -> None:
    clock = SecondsClock()
    rates = Rates(10, clock)
    assert number_allowed(rates, 64) == 1
    with pytest.raises(TooManyRequests, match=r"more than 10 requests a second \(OCTET_REQUESTS_PER_S\)") as refused:
        rates.charge(GREEDY, 64)
    assert refused.value.headers["Retry-After"] == "7"
    clock.now_s += float(refused.value.headers["Retry-After"])
    rates.charge(GREEDY, 64)


def test_one_principal_takes_nothing_of_another() -> None:
    rates = Rates(100, SecondsClock())
    number_allowed(rates, 1)
    rates.charge(MODEST, 1)


def test_without_a_limit_all_is_allowed() -> None:
    rates = Rates(0, SecondsClock())
    for _ in range(1000):
        rates.charge(GREEDY, 64)


def test_small_requests_cost_one_and_large_bodies_their_size() -> None:
    assert cost_of(0, is_list=False) == cost_of(4096, is_list=False) == 1
    assert cost_of(14 << 10, is_list=False) == 11
    assert cost_of(MAX_BODY_BYTES, is_list=False) == 61
    assert cost_of(0, is_list=True) == 5


def _unknown_names(spec: Document) -> Document:
    return spec | {"training": spec["training"] | {f"{'x' * 40}{number}": number for number in range(900)}}


def _wrong_labels(spec: Document) -> Document:
    return spec | {"labels": {f"{'a b' * 10}{number}": [1] for number in range(600)}}


def _long_globs(spec: Document) -> Document:
    return spec | {"data": spec["data"] | {"exclude": [f"{'*' * 200}{number}" for number in range(250)]}}


def _short_names(spec: Document) -> Document:
    return spec | {f"a{number}": 1 for number in range(300)}


class Counted(Rates):
    """Rates that count what is charged."""

    def __init__(self) -> None:
        super().__init__(0)
        self.charged = 0.0

    def charge(self, principal: Principal, cost: float) -> None:
        self.charged += cost


@ON_SQLITE
@pytest.mark.parametrize("attack", [_unknown_names, _wrong_labels, _long_globs, _short_names])
def test_a_body_takes_at_most_twice_the_cpu_that_it_is_charged_for(
    world: World, spec_document: Document, attack: Callable[[Document], Document]
) -> None:
    """So one who sends the worst bodies takes no more than twice what one does who sends small ones."""
    usual, worst = (json.dumps(each).encode() for each in (spec_document, attack(spec_document)))
    assert len(worst) <= MAX_BODY_BYTES
    app = create_app(world.settings, database=world.database)
    rates = Counted()
    app.state.context = dataclasses.replace(app.state.context, rates=rates)
    of_usual, of_worst = cpu_s(app, usual), cpu_s(app, worst)
    charged = cost_of(len(worst), is_list=False) + rates.charged / NUM_MEASURED
    assert of_worst <= 2 * charged * of_usual


NUM_MEASURED = 10


def cpu_s(app: FastAPI, body: bytes) -> float:
    """Return the CPU time of reading a body in all threads, the least of several."""

    async def read() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "headers": headers, "app": app, "state": {"principal": GREEDY}}
        try:
            await read_json(Request(scope, receive), JobSpec)
        except ServiceError as error:
            error.problem().model_dump_json()

    def once() -> float:
        began = time.process_time()
        asyncio.run(read())
        return time.process_time() - began

    return min(once() for _ in range(NUM_MEASURED))


@ON_SQLITE
def test_a_principal_over_its_limit_is_429_and_another_is_served(world: World, tmp_path: Path, spec_document: Document) -> None:
    keys = ("greedy:the key of the greedy", "modest:the key of the modest")
    app = create_app(Settings(data_dir=tmp_path, api_keys=keys, requests_per_s=0.001), database=world.database)
    greedy, modest = ({"Authorization": f"Bearer {key.partition(':')[2]}"} for key in keys)
    large = spec_document | {"labels": {"a": "x" * 50_000}}
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.post("/v1/jobs", json=large, headers=greedy).status_code == 422
        refused = client.post("/v1/jobs", json=large, headers=greedy)
        assert problem_of(refused, 429).code is ErrorCode.TOO_MANY_REQUESTS
        assert int(refused.headers["Retry-After"]) > 0
        # 18 of 64 are left, and a list counts as 5.
        assert [client.get("/v1/jobs", headers=greedy).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert client.post("/v1/jobs", json=large, headers=modest).status_code == 422
        assert client.get("/healthz", headers=greedy).status_code == 200
