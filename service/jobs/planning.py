"""Plans: states at once, and peaks from a process with torch that starts with the first plan that wants one.

The process is asked line by line (`octet.worker.planning`). Whatever becomes of it, a plan is answered: a peak that does not
come in time, or from a process that has died, is left out with the reason. The API and the dispatcher of one server share a
`Planning`, and so the process.
"""

import asyncio
import os
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, TypeVar

from anyio.to_thread import run_sync
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octet.api_schemas import JobSpec, PoolConfig
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.plan import (
    NO_TRITON,
    Candidate,
    Plan,
    PlanRequest,
    PlanRow,
    TraceReply,
    TraceRequest,
    being_traced,
    candidates,
    candidates_of_job,
    changes_of,
    choose_level,
    fits,
    job_plan,
    missing_in,
    needs_changes,
    plan_of,
    read_configs,
    row_of,
    rows_of,
    savings_of_job,
    trace_key,
    traces_of,
    with_remedies,
)
from octet.service.settings import Settings

Answer = TypeVar("Answer")

DEADLINE_S = 30.0
MOST_WAITING = 64
MOST_KEPT = 256
LONGEST_REPLY = 1 << 24
"""Bytes of a line: a network of thousands of layers has all their names."""


def _late() -> str:
    return f"its peak was not traced within {DEADLINE_S:g} s; ask again later"


def why_no_peaks(settings: Settings) -> str | None:
    """Return why a server traces no peaks at all; None if it does."""
    if not settings.planner:
        return "this server traces no peaks: its setting planner is off"
    if find_spec("torch") is None:
        return "this server traces no peaks: octet-fp8[worker] is not installed there"
    if find_spec("triton") is None:
        return f"this server traces no peaks: {NO_TRITON}"
    return None


class Waiting(NamedTuple):
    """The answers to a request: to the job's own micro-batch, and the last one."""

    own: asyncio.Future[TraceReply]
    last: asyncio.Future[TraceReply]


class Planner:
    """Asks the process, and keeps its last answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._keys: dict[str, str] = {}
        """The jobs that the process traces, by the number of the request."""
        self._waiting: dict[str, Waiting] = {}
        self._kept: dict[str, TraceReply] = {}
        self.num_disagreements = 0
        """Traces whose states are not those of the closed form."""

    async def plan(self, request: PlanRequest, on_rows: Callable[[Plan], None] | None = None) -> Plan:
        """Return the plan of a job. Its pool is one of the settings'.

        on_rows: takes the plan as far as it is known: states at once, then with each peak, that of the job's own level first.
        """
        job = request.job
        pool = self._settings.pool(job.resources.pool)
        missing = () if pool is None else missing_in(pool)
        found = candidates(request, pool)
        if on_rows is None:
            rows = await self._rows(found)
        else:
            rows = await self._rows(found, job.precision.level, lambda some: on_rows(plan_of(job, some, (), missing)))
        changes = await self._rows(changes_of(job)) if needs_changes(job, rows) else []
        return plan_of(job, rows, changes, missing)

    async def plan_job(self, job: JobSpec, pool: PoolConfig) -> JobPlan:
        """Return the plan by which a job is placed, within about the deadline; of one that does not fit, within two.

        What the states alone exclude is not traced, and level auto traces no further than to the first level that fits.
        """
        found = candidates_of_job(job, pool)
        rows = await run_sync(rows_of, found, [pool], ())
        try:
            async with asyncio.timeout(DEADLINE_S):
                for index, candidate in enumerate(found):
                    if candidate.spec is not None and fits(rows[index], pool.name) != "no":
                        (rows[index],) = await self._rows([candidate])
                        if choose_level(rows[: index + 1], pool.name) is None or fits(rows[index], pool.name) == "yes":
                            break
        except TimeoutError:
            rows[index] = rows[index].model_copy(update={"reason": _late()})
        plan = job_plan(job, pool, rows, version("octet-fp8"))
        if plan.verdict != "no":
            return plan
        own = next(each.spec for each in found if each.level == plan.level)
        assert own is not None, "a level that was chosen is possible"
        savings = savings_of_job(own, pool)
        by_states = await run_sync(rows_of, savings, [pool], ())
        kept = [each for each, row in zip(savings, by_states, strict=True) if fits(row, pool.name) != "no"]
        return with_remedies(plan, own, pool, await self._rows(kept))

    async def _rows(
        self, found: list[Candidate], first: str | None = None, on_rows: Callable[[list[PlanRow]], None] | None = None
    ) -> list[PlanRow]:
        """Return the rows of candidates. first: the level that is traced before others. on_rows: takes those known so far."""
        requests, unread = await run_sync(read_configs, traces_of(found, first), self._settings.readable_files)
        replies = being_traced(requests) | {reply.id: reply for reply in unread}
        unanswered = {request.id for request in requests}

        async def rows_now() -> list[PlanRow]:
            return await run_sync(rows_of, found, self._settings.pools, list(replies.values()))

        coming = [asyncio.ensure_future(self._reply(request)) for request in requests]
        if on_rows is not None:
            coming += [asyncio.ensure_future(self._reply(request, own=True)) for request in requests]
        try:
            if on_rows is not None:
                rows = await rows_now()
                on_rows(list(rows))
            for next_reply in asyncio.as_completed(coming):
                reply = await next_reply
                known = replies[reply.id].peak
                if reply.more and known is not None:  # the last one came first
                    continue
                replies[reply.id] = reply.model_copy(update={"peak": reply.peak or known})
                unanswered.discard(reply.id)
                index = int(reply.id.split(".")[0])
                if on_rows is None or any(other.startswith(f"{index}.") for other in unanswered):  # of a pipeline
                    continue
                if reply.network is not None:
                    rows = await rows_now()
                else:
                    rows[index] = await run_sync(row_of, index, found, self._settings.pools, list(replies.values()))
                on_rows(list(rows))
        finally:
            for each in coming:
                each.cancel()  # of a plan that is given up; the process traces on, and its answer is kept
        rows = await rows_now()
        self.num_disagreements += sum(row.states_agree is False for row in rows)
        return rows

    async def _reply(self, request: TraceRequest, *, own: bool = False) -> TraceReply:
        key = trace_key(request)
        reply = self._kept.get(key) or await self._ask(key, request, own=own)
        return reply.model_copy(update={"id": request.id})

    async def _ask(self, key: str, request: TraceRequest, *, own: bool) -> TraceReply:
        """Ask the process for a peak, unless it traces it already, and wait until the deadline. A late reply is kept.

        own: the job's own micro-batch is enough.
        """
        answer, reason = self._waiting.get(key), why_no_peaks(self._settings)
        if reason is None and answer is None and len(self._waiting) >= MOST_WAITING:
            reason = f"{MOST_WAITING} traces are waiting; ask again later"
        if reason is not None:
            return TraceReply(id=request.id, reason=reason)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._waiting[key] = Waiting(loop.create_future(), loop.create_future())
            sending = asyncio.create_task(self._send(key, request))  # which no deadline ends halfway
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(answer.own if own else answer.last)
        except TimeoutError:
            found = answer.own.result() if answer.own.done() else TraceReply(id=request.id)
            return found.model_copy(update={"more": False, "reason": _late()})

    async def _send(self, key: str, request: TraceRequest) -> None:
        number = str(next(self._numbers))
        try:
            async with self._starting:
                if self._process is None or self._process.returncode is not None:
                    if self._reader is not None:
                        await self._reader  # it answers those who had asked the process before
                    self._process = await self._started()
                    self._reader = asyncio.create_task(self._read(self._process))
            assert self._process.stdin is not None
            self._keys[number] = key
            self._process.stdin.write(request.model_copy(update={"id": number}).model_dump_json().encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            self._answer(key, TraceReply(id=number, reason=f"the planner's process does not run: {error}"))

    async def _started(self) -> Process:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["OMP_NUM_THREADS"] = "1"
        command = (sys.executable, "-m", "octet.worker.planning")
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, limit=LONGEST_REPLY
        )

    async def _read(self, process: Process) -> None:
        """Hand out replies until the process ends; then tell those who wait."""
        assert process.stdout is not None
        async for line in process.stdout:
            reply = TraceReply.model_validate_json(line)
            self._answer(self._keys[reply.id] if reply.more else self._keys.pop(reply.id), reply)
        status = await process.wait()
        for number, key in self._keys.items():
            self._answer(key, TraceReply(id=number, reason=f"the planner's process ended with status {status}; ask again"))
        self._keys.clear()

    def _answer(self, key: str, reply: TraceReply) -> None:
        if (waiting := self._waiting.get(key)) is not None:
            for answer in waiting[: 1 if reply.more else 2]:
                if not answer.done():
                    answer.set_result(reply)
        if reply.more:
            return
        self._waiting.pop(key, None)
        if reply.peak is not None and reply.reason is None:
            if len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = reply

    async def close(self) -> None:
        """End the process, which gives up its traces."""
        for sending in list(self._sending):
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._reader is not None:
            await self._reader


class Planning(Collector):
    """A planner in a thread of its own, which any thread asks. The thread starts with the first plan."""

    def __init__(self, settings: Settings) -> None:
        self._planner = Planner(settings)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def plan(self, request: PlanRequest, on_rows: Callable[[Plan], None] | None = None) -> "Future[Plan]":
        """Plan a job that may never be submitted. Its pool is one of the settings'. on_rows: called in the planner's thread."""
        return self._run(lambda: self._planner.plan(request, on_rows))

    def plan_job(self, job: JobSpec, pool: PoolConfig) -> "Future[JobPlan]":
        """Plan a job that is stored. pool: its own, which states its memory."""
        return self._run(lambda: self._planner.plan_job(job, pool))

    def _run(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> "Future[Answer]":
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="octet-planning", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def close(self) -> None:
        """End the process and the thread. Plans under way are given up."""
        with self._starting:
            if self._loop is None or self._thread is None or self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._planner.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "octet_plan_disagreements", "traces of plans whose states are not those of the closed form"
        )
        family.add_metric([], self._planner.num_disagreements)
        return [family]
