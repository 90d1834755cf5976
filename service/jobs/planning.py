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
        self._numbers = count()
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
        if (kept := self._kept.get(key)) is not None:
            return kept.model_copy(update={"id": request.id})
        reply = await self._ask(request)
        if reply.peak is not None:
            if len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = reply
        return reply.model_copy(update={"id": request.id})

    async def _ask(self, request: TraceRequest) -> TraceReply:
        """Ask the process for a peak, and wait until the deadline."""
        reason = None
        if not self._settings.planner:
            reason = "this server traces no peaks: its setting planner is off"
        elif find_spec("torch") is None:
            reason = "this server traces no peaks: octet-fp8[worker] is not installed there"
        elif len(self._waiting) >= MOST_WAITING:
            reason = f"{MOST_WAITING} traces are waiting; ask again later"
        if reason is not None:
            return TraceReply(id=request.id, reason=reason)
        number = str(next(self._numbers))
        answer: asyncio.Future[TraceReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._send(request.model_copy(update={"id": number}))
                return await answer
        except TimeoutError:
            return TraceReply(id=request.id, reason=f"its peak was not traced within {DEADLINE_S:g} s")
        except OSError as error:
            return TraceReply(id=request.id, reason=f"the planner's process does not run: {error}")
        finally:
            self._waiting.pop(number, None)

    async def _send(self, request: TraceRequest) -> None:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
                environment["OMP_NUM_THREADS"] = "1"
                command = (sys.executable, "-m", "octet.worker.planning")
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
                )
                self._reader = asyncio.create_task(self._read(self._process))
        assert self._process.stdin is not None
        self._process.stdin.write(request.model_dump_json().encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self, process: Process) -> None:
        """Hand out replies until the process ends; then tell those who wait."""
        assert process.stdout is not None
        async for line in process.stdout:
            reply = TraceReply.model_validate_json(line)
            self._answer(reply.id, reply)
        status = await process.wait()
        for number in list(self._waiting):
            self._answer(number, TraceReply(id=number, reason=f"the planner's process ended with status {status}; ask again"))

    def _answer(self, number: str, reply: TraceReply) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def close(self) -> None:
        """End the process, which gives up its traces."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._reader is not None:
            await self._reader
