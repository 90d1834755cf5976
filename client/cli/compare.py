"""The command that compares: levels or fields of a job file, a comparison that is there already, or any jobs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.text import Text

from octet.api_schemas import explain
from octet.api_schemas.comparison import ComparisonSpec, ComparisonState
from octet.api_schemas.comparison_report import ComparisonDetails, ComparisonReport
from octet.client.api import Client
from octet.client.cli.options import (
    COMPARISON_ID,
    DEFAULT_URL,
    FAILED,
    INTERRUPTED,
    REFUSED,
    AsJson,
    Commands,
    Settings,
    Url,
    connect,
    find_job,
    varied,
)
from octet.client.errors import ConnectionFailed, SpecRefused
from octet.client.job_file import apply_settings, load_job_file
from octet.client.render import comparison_details, comparisons_table
from octet.client.report_page import as_page
from octet.client.reports import as_markdown
from octet.client.terminal import Terminal

_FILE = re.compile(r"-|.*\.(ya?ml|json)", re.DOTALL)


def compare(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE | ID | JOB JOB…", help="A job file, a comparison's id, or jobs. None: list comparisons."),
    ] = None,
    levels: Annotated[str | None, typer.Option("--levels", help="With FILE: levels to compare, as bf16-amp,te,O2.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=A,B", help="With FILE: training.optimizer.learning_rate=1e-4,3e-4"),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=2, help="With FILE: the most of each arm. Default: 5.")] = None,
    least_seeds: Annotated[int | None, typer.Option("--least-seeds", min=2, help="With FILE: before an answer.")] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, help="With FILE: the most jobs at a time. Default: 2.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", min=0.0, help="The share of the loss that may be lost. Default: 0.0025.")
    ] = None,
    baseline: Annotated[str | None, typer.Option("--baseline", metavar="ARM", help="With FILE. Default: the first.")] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="With FILE: slot time of all its jobs, as 2h or 90m. Default: none."),
    ] = None,
    settings: Settings = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, and do not follow.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as one HTML file.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Compare levels, or values of a field, over seeds until the answer is certain; exit 0 if every arm has one."""
    named = what or []
    is_file = len(named) == 1 and _FILE.fullmatch(named[0]) is not None
    given: dict[str, Any] = {"levels": levels, "vary": vary, "baseline": baseline, "budget": budget}
    given |= {"seeds": seeds, "least_seeds": least_seeds, "at_once": at_once}
    if not is_file and (unused := [name for name, value in given.items() if value is not None]):
        option = f"--{unused[0].replace('_', '-')}"
        raise typer.BadParameter("got it without a job file; allowed: octet compare job.yaml …", param_hint=option)
    terminal = Terminal()
    with connect(url) as client:
        if is_file:
            found = client.compare(_spec(named[0], given | {"tolerance": tolerance}, settings or []))
            if detach:
                next_step = Text(f"{found.id} is {found.state.value}. Follow it with: octet compare {found.id}")
                terminal.show_json(found) if as_json else terminal.show(next_step)
                return
            report = _follow(client, found.id, terminal, as_json)
        elif not named:
            every = list(client.comparisons())
            terminal.show_json_array(every) if as_json else terminal.show(comparisons_table(every))
            return
        elif len(named) == 1:
            report = _follow(client, _id(named[0]), terminal, as_json, waits=not detach)
        else:
            report = _of_jobs(client, named, tolerance, terminal, as_json)
    title, shown, left_out, is_answered = report
    _write(markdown, as_markdown(title, shown, left_out))
    _write(html, as_page(title, shown, left_out))
    if not is_answered:
        raise typer.Exit(FAILED)


_Report = tuple[str, ComparisonReport, Sequence[str], bool]
"""The title, the report, what was left out, and True if every arm has a certain answer."""


def _spec(file: str, given: dict[str, Any], settings: Sequence[str]) -> ComparisonSpec:
    """Read a comparison from a job file and the options. Raises SpecRefused with the violations that the server would list."""
    job = load_job_file(file)
    apply_settings(job, settings)
    document = {name: value for name, value in given.items() if value is not None} | {"job": job}
    if (budget := document.pop("budget", None)) is not None:
        document["budget_slot_hours"] = _hours(budget)
    if given["levels"] is not None:
        document["levels"] = [level.strip() for level in given["levels"].split(",")]
    if given["vary"] is not None:
        document["vary"] = dict(varied(text) for text in given["vary"])
    try:
        return ComparisonSpec.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise SpecRefused(f"the comparison of {file}", explain(error, ComparisonSpec)) from error


def _hours(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([hm])", text)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"got {text!r}; allowed: hours or minutes above 0, such as 2h or 90m", param_hint="--budget")
    return float(found[1]) / (1 if found[2] == "h" else 60)


def _id(text: str) -> str:
    if COMPARISON_ID.fullmatch(text) is None:
        raise typer.BadParameter(f"got {text}; allowed: a job file (.yaml, .json, -), cmp_…, or two jobs and more.")
    return text


def _follow(client: Client, comparison_id: str, terminal: Terminal, as_json: bool, *, waits: bool = True) -> _Report:
    """Show what happens until a comparison is over, then its report. Ctrl-C leaves; the comparison goes on."""
    seen: set[tuple[str, int]] = set()

    def show(found: ComparisonDetails) -> None:
        for child in found.children:
            if child.outcome is not None and (child.arm, child.seed) not in seen:
                seen.add((child.arm, child.seed))
                terminal.note(f"{child.arm}, seed {child.seed}: {child.outcome} ({child.job_id})")

    try:
        found = client.wait_for_comparison(comparison_id, show) if waits else client.comparison(comparison_id)
    except KeyboardInterrupt:
        terminal.complain(f"Detached: the comparison goes on. Follow it with: octet compare {comparison_id}")
        raise typer.Exit(INTERRUPTED) from None
    except ConnectionFailed:
        terminal.complain(f"The comparison may go on. Follow it again with: octet compare {comparison_id}")
        raise
    terminal.show_json(found) if as_json else terminal.show(comparison_details(found.report, found.report.left_out))
    if not as_json and found.state.is_terminal:
        why = f": {found.message}" if found.message != found.report.not_calm else ""
        terminal.show(Text(f"{found.id} is {found.state.value}{why.rstrip('.')}."))
    is_answered = found.state is ComparisonState.FINISHED and _is_answered(found.report)
    return f"{found.name}, {found.id}", found.report, found.report.left_out, is_answered


def _of_jobs(client: Client, names: Sequence[str], tolerance: float | None, terminal: Terminal, as_json: bool) -> _Report:
    """Compare jobs, and show their report."""
    jobs = [find_job(client, name) for name in names]
    try:
        found, left_out = client.compare_jobs(jobs) if tolerance is None else client.compare_jobs(jobs, tolerance)
    except ValueError as error:
        terminal.complain(str(error))
        raise typer.Exit(REFUSED) from error
    terminal.show_json(found) if as_json else terminal.show(comparison_details(found, left_out))
    return ", ".join(job.name for job in jobs), found, left_out, _is_answered(found)


def _is_answered(report: ComparisonReport) -> bool:
    return all(arm.answer in ("baseline", "yes", "no") for arm in report.arms)


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        Terminal().complain(f"cannot write {path}: {error.strerror or error}. Name another file.")
        raise typer.Exit(REFUSED) from error


COMMANDS: Commands = {"compare": compare}
