"""Commands that read: list, show, attempts, checkpoints, metrics, events, logs, models, levels, pools, usage."""

import itertools
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.text import Text

from octet.api_schemas import Job, JobState
from octet.client import render
from octet.client.api import Client
from octet.client.charts import Line, loss_chart
from octet.client.cli.options import DEFAULT_URL, AsJson, Commands, JobId, Url, connect, find_to_read
from octet.client.terminal import Terminal

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")]

_AGE = re.compile("(?P<number>[0-9]{1,6})(?P<unit>[smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_CHART_LINES = 16
_CHART_POINTS = 300


def list_jobs(
    state: Annotated[list[JobState] | None, typer.Option("--state", help="Only jobs in this state; may be repeated.")] = None,
    level: Annotated[str | None, typer.Option("--level", help="Only jobs at this precision level.")] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="Only jobs of this pool.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="KEY:VALUE", help="Only jobs so labelled; KEY=VALUE too.")
    ] = None,
    search: Annotated[str | None, typer.Option("--search", "-s", help="Only jobs whose name has this in it.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100, help="Jobs of one page.")] = 20,
    page: Annotated[int, typer.Option("--page", "-p", min=1, help="Which page.")] = 1,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    terminal, states = Terminal(), [each.value for each in state or ()]
    wanted = None if label is None else _label(label)
    skipped = (page - 1) * limit
    with connect(url) as client:
        if as_json:
            one = states[0] if len(states) == 1 else None
            found = (
                job
                for job in client.jobs(state=one, pool=pool, label=wanted)
                if (not states or job.state in states)
                and level in (None, job.spec.precision.level)
                and (search or "").casefold() in job.name.casefold()
            )
            terminal.show_json_array(itertools.islice(found, skipped, skipped + limit))
            return
        filters = {"level": level, "pool": pool, "label": wanted, "search": search}
        shown = client.rows(states=states, **filters, limit=limit, offset=skipped)
        if not shown.data:
            terminal.show(Text(_empty(client, states, filters, page, shown.total)))
            return
    terminal.show(render.rows_table(shown.data, is_narrow=terminal.is_live))
    terminal.show(render.reasons(shown.data))
    last = skipped + len(shown.data)
    if shown.total > len(shown.data):
        following = f"; the next page: --page {page + 1}" if last < shown.total else ""
        terminal.note(f"{skipped + 1} to {last} of {shown.total} jobs{following}")


def _empty(client: Client, states: Sequence[str], filters: dict[str, str | None], page: int, total: int) -> str:
    """Say why a list is empty."""
    if total:
        return f"Page {page} is empty: all {total} jobs stand on the pages before it."
    given = [f"--state {state}" for state in states]
    given += [f"--{name} {value}" for name, value in filters.items() if value is not None]
    all_jobs = client.rows(limit=1).total
    if not all_jobs:
        return "No jobs. Submit one with: octet submit job.yaml"
    others = f"is {all_jobs} job" if all_jobs == 1 else f"are {all_jobs} jobs"
    return f"No job fits {' '.join(given)}. Without the filter there {others}: octet list"


def _label(text: str) -> str:
    """Read key:value or key=value, which no key contains, and return it as the server takes it."""
    found = re.fullmatch(r"([^:=]+)[:=](.*)", text)
    if found is None:
        allowed = "key:value or key=value, such as team:research"
        raise typer.BadParameter(f"got {text!r}; allowed: {allowed}. Give the value too.", param_hint="--label")
    return f"{found[1]}:{found[2]}"


def show(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a job: its state, why it waits or failed, its results."""
    terminal = Terminal()
    with connect(url) as client:
        job = find_to_read(client, job_id)
        if as_json:
            terminal.show_json(job)
        else:
            terminal.show(render.job_details(job, list(client.checkpoints(job.id))))


def attempts(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a job's attempts, and why each ended."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.attempts(find_to_read(client, job_id).id))
    terminal.show_json_array(found) if as_json else terminal.show(render.attempts_table(found))


def checkpoints(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the checkpoints of a job."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.checkpoints(find_to_read(client, job_id).id))
    terminal.show_json_array(found) if as_json else terminal.show(render.checkpoints_table(found))


def metrics(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB…", help="A job as in other commands; several are compared.")],
    rows: Annotated[
        int, typer.Option("--rows", min=2, max=1000, help="Rows, each of as many steps; JSON has every step.")
    ] = 25,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the curve of a job, or of several over one another."""
    terminal = Terminal()
    if as_json and len(job_ids) > 1:
        raise typer.BadParameter("--json has the curve of one job. Ask once for each.", param_hint="JOB…")
    with connect(url) as client:
        jobs = [find_to_read(client, job_id) for job_id in job_ids]
        if as_json:
            terminal.show_json_array(client.metrics(jobs[0].id))
            return
        if terminal.is_live:
            _show_chart(client, jobs, terminal)
        first = client.curve(jobs[0].id, points=rows)
        curves = [first, *(client.curve(job.id, points=10_000, step_by=first.step_by) for job in jobs[1:])]
    names = _names_of(jobs)
    terminal.show(render.curve_table(first) if len(jobs) == 1 else render.comparison_table(names, curves))


def _show_chart(client: Client, jobs: Sequence[Job], terminal: Terminal) -> None:
    curves = [client.curve(job.id, points=_CHART_POINTS) for job in jobs]
    lines = [Line(name, curve.step, curve.loss) for name, curve in zip(_names_of(jobs), curves, strict=True)]
    chart = loss_chart(lines, width=min(terminal.out.width, 100) - 1, height=_CHART_LINES)
    terminal.show(chart if chart is not None else Text("No curve yet: it begins with the second step."))


def _names_of(jobs: Sequence[Job]) -> list[str]:
    """Return a name for each: its own, with its level and then its id where several are alike."""
    for name_of in (lambda job: job.name, lambda job: f"{job.name} {job.spec.precision.level}", lambda job: job.id):
        names = [name_of(job) for job in jobs]
        if len(set(names)) == len(names):
            break
    return names


def events(job_id: JobId, follow: Follow = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what happened to a job."""
    terminal, lines = Terminal(), render.Lines()
    with connect(url) as client:
        for event in client.events(find_to_read(client, job_id).id, follow=follow):
            terminal.show_json_line(event) if as_json else terminal.show(lines.event(event))


def logs(
    job_id: JobId,
    follow: Follow = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, max=100_000, help="Begin with so many last lines.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only lines since: 30s, 10m, 2h, 1d, a time.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's lines.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Only the lines of this # of `octet attempts`.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a job's log."""
    terminal, begin = Terminal(), None if since is None else _moment(since)
    with connect(url) as client:
        job = find_to_read(client, job_id)
        attempt_id = None if attempt is None else _attempt_id(client, job, attempt)
        lines = render.Lines(has_several_ranks=job.spec.resources.workers > 1)
        for line in client.logs(job.id, follow=follow, rank=rank, attempt_id=attempt_id, since=begin, tail=tail):
            terminal.show_json_line(line) if as_json else terminal.show(lines.log(line))


def _moment(text: str) -> datetime:
    """Return the time that a text names: an age, or a time by ISO 8601, local unless it names its zone."""
    try:
        if age := _AGE.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{_UNITS[age["unit"]]: int(age["number"])})
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        message = f"got {text!r}; allowed: 30s, 10m, 2h, 1d, or a time such as 2026-11-25T14:00"
        raise typer.BadParameter(message, param_hint="--since") from None


def _attempt_id(client: Client, job: Job, number: int) -> str:
    ids = {attempt.epoch: attempt.id for attempt in client.attempts(job.id)}
    if number not in ids:
        known = ", ".join(map(str, ids)) or "none yet"
        raise typer.BadParameter(f"got {number}; {job.id} has {known}", param_hint="--attempt")
    return ids[number]


def models(as_json: AsJson = False) -> None:
    """Show the models that a job can name, and the bytes of each at the levels. JSON has every level and architecture."""
    terminal, found = Terminal(), list(Client.models())
    terminal.show_json_array(found) if as_json else terminal.show(render.models_table(found))


def levels(as_json: AsJson = False) -> None:
    """Show what each precision level stores in what."""
    terminal, found = Terminal(), list(Client.levels())
    terminal.show_json_array(found) if as_json else terminal.show(render.levels_table(found))


def pools(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the pools, their slots and their queues."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.pools())
    terminal.show_json_array(found) if as_json else terminal.show(render.pools_table(found))


def usage(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what a project uses of its quotas: slots, jobs, slot hours of the month, storage."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.usage())
    terminal.show_json_array(found) if as_json else terminal.show(render.usage_table(found))


COMMANDS: Commands = {
    "list": list_jobs,
    "show": show,
    "logs": logs,
    "events": events,
    "metrics": metrics,
    "checkpoints": checkpoints,
    "attempts": attempts,
    "models": models,
    "levels": levels,
    "pools": pools,
    "usage": usage,
}
