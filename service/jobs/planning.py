"""Plans: states at once, and peaks from a process with torch that starts with the first plan that wants one.

The process is asked line by line (`octet.worker.planning`). Whatever becomes of it, a plan is answered: a peak that does not
come in time, or from a process that has died, is left out with the reason.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from importlib.util import find_spec
from itertools import count

from anyio.to_thread import run_sync

from octet.api_schemas.plan import (
    Candidate,
    Plan,
    PlanRequest,
    PlanRow,
    TraceReply,
    TraceRequest,
    candidates,
    changes_of,
    needs_changes,
    plan_of,
    rows_of,
    traces_of,
)
from octet.service.settings import Settings

DEADLINE_S = 30.0
MOST_WAITING = 64
MOST_KEPT = 256


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
        self._waiting: dict[str, asyncio.Future[TraceReply]] = {}
        self._kept: dict[str, TraceReply] = {}

    async def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of a job. Its pool is one of the settings'."""
        job = request.job
        rows = await self._rows(candidates(request, self._settings.pool(job.resources.pool)))
        changes = await self._rows(changes_of(job)) if needs_changes(job, rows) else []
        return plan_of(job, rows, changes)

    async def _rows(self, found: list[Candidate]) -> list[PlanRow]:
        replies = await asyncio.gather(*map(self._reply, traces_of(found)))
        return await run_sync(rows_of, found, self._settings.pools, replies)

    async def _reply(self, request: TraceRequest) -> TraceReply:
        key = request.job.model_dump_json(include={"model", "precision", "training", "parallelism", "resources"})
        reply = self._kept.get(key) or await self._ask(key, request)
        return reply.model_copy(update={"id": request.id})

    async def _ask(self, key: str, request: TraceRequest) -> TraceReply:
        """Ask the process for a peak, unless it traces it already, and wait until the deadline. A late reply is kept."""
        answer, reason = self._waiting.get(key), None
        if not self._settings.planner:
            reason = "this server traces no peaks: its setting planner is off"
        elif find_spec("torch") is None:
            reason = "this server traces no peaks: octet-fp8[worker] is not installed there"
        elif answer is None and len(self._waiting) >= MOST_WAITING:
            reason = f"{MOST_WAITING} traces are waiting; ask again later"
        if reason is not None:
            return TraceReply(id=request.id, reason=reason)
        if answer is None:
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
            sending = asyncio.create_task(self._send(key, request))  # which no deadline ends halfway
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            return TraceReply(id=request.id, reason=f"its peak was not traced within {DEADLINE_S:g} s; ask again later")

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
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)

    async def _read(self, process: Process) -> None:
        """Hand out replies until the process ends; then tell those who wait."""
        assert process.stdout is not None
        async for line in process.stdout:
            reply = TraceReply.model_validate_json(line)
            self._answer(self._keys.pop(reply.id), reply)
        status = await process.wait()
        for number, key in self._keys.items():
            self._answer(key, TraceReply(id=number, reason=f"the planner's process ended with status {status}; ask again"))
        self._keys.clear()

    def _answer(self, key: str, reply: TraceReply) -> None:
        if (answer := self._waiting.pop(key, None)) is not None and not answer.done():
            answer.set_result(reply)
        if reply.peak is not None:
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
