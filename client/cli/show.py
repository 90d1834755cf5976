"""Commands that read: list, show, attempts, checkpoints, metrics, events, logs, models, levels, pools."""

import re
from typing import Annotated

import typer
from rich.text import Text

from octet.api_schemas import JobState, MetricPoint
from octet.client import render
from octet.client.cli.options import DEFAULT_URL, AsJson, Commands, JobId, Url, connect, find_job
from octet.client.terminal import Terminal

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")]


def list_jobs(
    state: Annotated[JobState | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="KEY:VALUE", help="Only jobs so labelled; KEY=VALUE too.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    terminal = Terminal()
    wanted = None if label is None else _label(label)
    with connect(url) as client:
        jobs = list(client.jobs(state=state.value if state else None, label=wanted, limit=limit))
    if as_json:
        terminal.show_json_array(jobs)
    else:
        terminal.show(render.jobs_table(jobs) if jobs else Text("No jobs. Submit one with: octet submit job.yaml"))


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
        job = find_job(client, job_id)
        if as_json:
            terminal.show_json(job)
        else:
            terminal.show(render.job_details(job, list(client.checkpoints(job.id))))


def attempts(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a job's attempts, and why each ended."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.attempts(find_job(client, job_id).id))
    terminal.show_json_array(found) if as_json else terminal.show(render.attempts_table(found))


def checkpoints(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the checkpoints of a job."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.checkpoints(find_job(client, job_id).id))
    terminal.show_json_array(found) if as_json else terminal.show(render.checkpoints_table(found))


def metrics(
    job_id: JobId,
    rows: Annotated[int, typer.Option("--rows", min=2, help="Show so many steps, evenly spread. JSON has all.")] = 25,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a job's curve."""
    terminal = Terminal()
    with connect(url) as client:
        points = list(client.metrics(find_job(client, job_id).id))
    terminal.show_json_array(points) if as_json else terminal.show(render.metrics_table(_spread(points, rows)))


def events(job_id: JobId, follow: Follow = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what happened to a job."""
    terminal = Terminal()
    with connect(url) as client:
        for event in client.events(find_job(client, job_id).id, follow=follow):
            terminal.show_json_line(event) if as_json else terminal.show(render.event_line(event))


def logs(
    job_id: JobId,
    follow: Follow = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's lines.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a job's log."""
    terminal = Terminal()
    with connect(url) as client:
        for line in client.logs(find_job(client, job_id).id, follow=follow, rank=rank):
            terminal.show_json_line(line) if as_json else terminal.show(render.log_line(line))


def models(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the models that a job can name, and the bytes of each at the levels. JSON has every level and architecture."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.models())
    terminal.show_json_array(found) if as_json else terminal.show(render.models_table(found))


def levels(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what each precision level stores in what."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.levels())
    terminal.show_json_array(found) if as_json else terminal.show(render.levels_table(found))


def pools(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the pools, their slots and their queues."""
    terminal = Terminal()
    with connect(url) as client:
        found = list(client.pools())
    terminal.show_json_array(found) if as_json else terminal.show(render.pools_table(found))


def _spread(points: list[MetricPoint], count: int) -> list[MetricPoint]:
    """Choose `count` evenly spread points, the first and the last among them, and all points with an evaluation."""
    last = len(points) - 1
    if last < count:
        return points
    kept = {round(position * last / (count - 1)) for position in range(count)}
    return [point for index, point in enumerate(points) if index in kept or point.evaluation_loss is not None]


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
}
