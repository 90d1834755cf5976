"""Show the progress of jobs until all are over: redrawn on a terminal, a line now and then elsewhere.

On a terminal the loss curves stand below the jobs, and what each job holds in memory beside what fp32 would take.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from octet.api_schemas import Event, Job
from octet.api_schemas.problem import ErrorCode
from octet.client.api import Client
from octet.client.charts import Line, loss_chart
from octet.client.errors import ApiError, ConnectionFailed
from octet.client.render import num_steps, progress_words, short, state_text, table
from octet.client.terminal import Terminal
from octet.client.text import duration, num_bytes, number, one_line

PLAIN_PROGRESS_EVERY_S = 5.0
CURVES_EVERY_S = 2.0
_CHART_POINTS = 200
_LINES_LEFT = 6
"""Lines of a terminal that the chart leaves to the rest: headings, reasons to wait, and the last events."""
_LEAST_CHART_LINES, _MOST_CHART_LINES = 8, 16
_WIDEST_CHART = 100


class _Display(AbstractContextManager["_Display"], Protocol):
    def note(self, text: str) -> None:
        """Show a line that stays."""

    def draw(self, jobs: Sequence[Job]) -> None:
        """Show where the jobs are now."""


def watch(
    client: Client,
    job_ids: Sequence[str],
    terminal: Terminal,
    *,
    poll_s: float = 0.5,
    reconnect_s: float = 60.0,
    check: Callable[[], None] = lambda: None,
) -> list[Job]:
    """Show what happens to the jobs; return them once all are over. Wait up to `reconnect_s` for a server that is away.

    `check` is called at each turn; an exception that it raises ends the watch.
    """
    last_seen = dict.fromkeys(job_ids, 0)
    away_since: float | None = None
    display: _Display = _LiveDisplay(terminal, client) if terminal.is_live else _PlainDisplay(terminal)
    with display:
        while True:
            check()
            try:
                jobs = [client.job(job_id) for job_id in job_ids]
                events = [(job, event) for job in jobs for event in client.events(job.id, after=last_seen[job.id])]
            except (ConnectionFailed, ApiError) as error:
                if isinstance(error, ApiError) and error.problem.status < 500:
                    raise
                if away_since is None:
                    away_since = time.monotonic()
                    display.note(f"the server does not answer; the jobs go on. Trying for {reconnect_s:g} s more.")
                if time.monotonic() - away_since >= reconnect_s:
                    raise
                time.sleep(poll_s)
                continue
            away_since = None
            for job, event in sorted(events, key=lambda pair: pair[1].at):
                last_seen[job.id] = max(last_seen[job.id], event.seq)
                display.note(_event_words(job, event))
            display.draw(jobs)
            if all(job.state.is_terminal for job in jobs):
                return jobs
            time.sleep(poll_s)


def _event_words(job: Job, event: Event) -> str:
    return f"{event.at.astimezone():%H:%M:%S}  {job.name}  {event.type}: {one_line(event.message)}"


class _PlainDisplay:
    """The display for files and pipes: a line when a job's state or reason to wait changes, and now and then its progress."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown: dict[str, tuple[str, str, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return None

    def note(self, text: str) -> None:
        self._terminal.show(Text(text))

    def draw(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            standing = f"{job.state.value} {job.queue.why if job.queue else ''}"
            line = one_line(f"{job.name}  {job.state.value}  {progress_words(job)}").rstrip()
            last_standing, last_line, shown_at = self._shown.get(job.id, ("", "", 0.0))
            if standing != last_standing or (line != last_line and now - shown_at >= PLAIN_PROGRESS_EVERY_S):
                self._terminal.show(Text(line))
                self._shown[job.id] = (standing, line, now)


class _LiveDisplay:
    """The display for terminals: a row per job, curves and memory, redrawn in place; events scroll away above it."""

    def __init__(self, terminal: Terminal, client: Client) -> None:
        self._live = Live(console=terminal.out, refresh_per_second=8)
        self._client = client
        self._asked_at = -CURVES_EVERY_S
        self._lines: list[Line] = []
        self._memory: list[Text] = []

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def draw(self, jobs: Sequence[Job]) -> None:
        are_over = all(job.state.is_terminal for job in jobs)
        if are_over or time.monotonic() - self._asked_at >= CURVES_EVERY_S:
            with contextlib.suppress(ConnectionFailed, ApiError):  # the jobs themselves say that the server is away
                self._ask(jobs)
            self._asked_at = time.monotonic()
        parts: list[RenderableType] = [_rows(jobs), *self._memory]
        room = self._live.console.height - len(parts) - len(jobs) - _LINES_LEFT
        if room >= _LEAST_CHART_LINES:
            width = min(self._live.console.width, _WIDEST_CHART) - 1
            chart = loss_chart(self._lines, width=width, height=min(room, _MOST_CHART_LINES))
            parts += [chart] if chart is not None else []
        self._live.update(Group(*parts))

    def _ask(self, jobs: Sequence[Job]) -> None:
        """Read the curves, and what the jobs hold in memory."""
        begun = [job for job in jobs if job.progress is not None]
        curves = [self._client.curve(job.id, points=_CHART_POINTS) for job in begun]
        self._lines = [Line(job.name, curve.step, curve.loss) for job, curve in zip(begun, curves, strict=True)]
        self._memory = [text for job in begun if (text := self._memory_of(job)) is not None]

    def _memory_of(self, job: Job) -> Text | None:
        try:
            memory = self._client.measurements(job.id).memory
        except ApiError as error:
            if error.problem.code is ErrorCode.NOT_FOUND:
                return None  # nothing is measured before the first step
            raise
        return None if memory is None else memory_line(job.name, memory.held, memory.fp32)


def memory_line(name: str, held: Mapping[str, int], fp32: Mapping[str, int]) -> Text:
    """Write what a job holds, how much fp32 would, and the largest classes."""
    total, in_fp32 = sum(held.values()), sum(fp32.values())
    largest = sorted(((count, kind) for kind, count in held.items() if count), reverse=True)[:3]
    classes = ", ".join(f"{kind} {num_bytes(count)}" for count, kind in largest)
    share = f", {total / in_fp32:.0%} of fp32's {num_bytes(in_fp32)}" if in_fp32 else ""
    return short(f"{name} holds {num_bytes(total)}{share}: {classes}")


def _rows(jobs: Sequence[Job]) -> Group:
    """Make a row per job, then a line for each that waits. All fits into 80 columns: redrawn lines must not wrap."""
    numbers = ("STEP", "LOSS", "TOKENS/S", "LEFT")
    grid = table("JOB", "STATE", "", *numbers, right=numbers, cut=("JOB",))
    grid.columns[2].max_width = 20
    waiting = []
    for job in jobs:
        steps, seen = num_steps(job), job.progress
        step = seen.step if seen else 0
        grid.add_row(
            short(job.name),
            state_text(job.state),
            ProgressBar(total=steps, completed=step),
            f"{step}/{number(steps, 'd')}",
            number(seen.loss if seen else None),
            number(seen.tokens_per_s if seen else None, ",.0f"),
            duration(seen.remaining_s if seen and not job.state.is_terminal else None),
        )
        if job.queue:
            why = one_line(f"{job.name} waits: {job.queue.why}")
            waiting.append(Text(why, style="yellow", no_wrap=True, overflow="ellipsis"))
    return Group(grid, *waiting)
