"""The threads of checks: who runs what, and what a slow check holds up."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from api_schemas import JobSpec
from service.jobs.admission import inputs_of
from service.jobs.check_threads import CheckThreads, Overdue
from tests.waiting import LONG_S


class Held:
    """A check that does not end until it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(LONG_S)


@pytest.fixture
def held() -> Iterator[list[Held]]:
    with ExitStack() as stack:
        checks = [Held() for _ in range(3)]
        for check in checks:
            stack.callback(check.may_end.set)
        yield checks


async def begins(check: Held) -> None:
    assert await asyncio.to_thread(check.begun.wait, LONG_S)


def test_each_request_gets_the_result_of_a_check_that_began_after_it(held: list[Held]) -> None:
    num_checks = 0

    def refuse() -> None:
        nonlocal num_checks
        num_checks += 1
        raise ValueError("no")

    async def story() -> None:
        threads = CheckThreads(1)
        first = asyncio.create_task(threads.run("slow", held[0], LONG_S))
        await begins(held[0])
        same = [asyncio.create_task(threads.run("slow", refuse, LONG_S)) for _ in range(3)]
        other = asyncio.create_task(threads.run("other", lambda: None, LONG_S))
        await asyncio.sleep(0)
        held[0].may_end.set()
        refusals = await asyncio.gather(*same, return_exceptions=True)
        assert [type(refusal) for refusal in refusals] == [ValueError] * 3
        await first
        await other

    asyncio.run(story())
    assert num_checks == 1


def test_other_threads_help_a_slow_one_up_to_their_number(held: list[Held]) -> None:
    async def story() -> None:
        threads = CheckThreads(2)
        tasks = [asyncio.create_task(threads.run(number, check, LONG_S)) for number, check in enumerate(held)]
        await begins(held[0])
        await begins(held[1])
        assert not held[2].begun.is_set()
        held[1].may_end.set()
        await begins(held[2])
        for check in held:
            check.may_end.set()
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_a_request_that_finds_no_thread_in_time_is_overdue_and_its_check_never_runs(held: list[Held]) -> None:
    async def story() -> None:
        threads = CheckThreads(1)
        slow = asyncio.create_task(threads.run("slow", held[0], LONG_S))
        await begins(held[0])
        with pytest.raises(Overdue):
            await threads.run("late", held[1], 0.02)
        held[0].may_end.set()
        await slow
        await threads.run("next", lambda: None, LONG_S)

    asyncio.run(story())
    assert not held[1].begun.is_set()


def test_a_result_for_a_loop_that_has_ended_harms_nobody(held: list[Held]) -> None:
    threads = CheckThreads(1)

    async def leave() -> None:
        task = asyncio.create_task(threads.run("left", held[0], LONG_S))
        await begins(held[0])
        task.cancel()

    asyncio.run(leave())
    held[0].may_end.set()
    asyncio.run(threads.run("next", lambda: None, LONG_S))


@pytest.mark.parametrize(
    ("part", "change", "shares"),
    [
        ("training", {"optimizer": {"learning_rate": 1e-4}}, True),
        ("training", {"sequence_length": 16}, False),
        ("data", {"path": "/elsewhere"}, False),
        ("model", {"num_layers": 2}, False),
    ],
)
def test_jobs_share_a_check_if_they_read_the_same(
    spec_document: dict[str, Any], part: str, change: dict[str, Any], shares: bool
) -> None:
    specs = [
        JobSpec.model_validate(spec_document | {part: each}) for each in (spec_document[part], spec_document[part] | change)
    ]
    one, other = (inputs_of(spec).key for spec in specs)
    assert (one == other) is shares
    assert one == inputs_of(specs[0].model_copy(update={"name": "another"})).key


def test_jobs_whose_options_have_no_hash_share_no_check(spec_document: dict[str, Any]) -> None:
    inputs = inputs_of(JobSpec.model_validate(spec_document))._replace(model=[])  # type: ignore[arg-type]
    assert inputs.key != inputs.key
