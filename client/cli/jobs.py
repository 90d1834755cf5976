"""Commands that act on jobs: submit, clone, validate, watch, change, pause, resume, cancel, retry, delete."""

from typing import Annotated, Any

import typer
from rich.text import Text

from octet.api_schemas import Job, JobState, ValidatedJob
from octet.api_schemas.comparison import Comparison
from octet.api_schemas.job_batch import SWEEP, SubmittedJobs, sweep
from octet.client.api import Client
from octet.client.cli.options import (
    COMPARISON_ID,
    DEFAULT_URL,
    FAILED,
    INTERRUPTED,
    AsJson,
    Commands,
    JobFile,
    JobId,
    Settings,
    Url,
    connect,
    find_job,
    find_to_read,
    varied,
)
from octet.client.job_file import apply_settings, check_spec, load_job_file
from octet.client.render import job_details
from octet.client.terminal import Terminal
from octet.client.text import num_bytes
from octet.client.watch import watch as watch_jobs


def submit(
    file: JobFile,
    settings: Settings = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=A,B", help="Submit a job for each value; of several --vary, each with each."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until it is over.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Submit a job, or one for each value of the fields that --vary names."""
    document = load_job_file(file)
    apply_settings(document, settings or [])
    spec = check_spec(document, file)
    if vary and watch:
        raise typer.BadParameter("it shows one job; allowed: without --vary. See all by: octet list", param_hint="--watch")
    with connect(url) as client:
        if vary:
            _show_sweep(client.submit_all(document, sweep(dict(map(varied, vary)))), as_json)
        else:
            _show_submitted(client, client.submit(spec), watch, as_json)


def _show_sweep(jobs: tuple[Job, ...], as_json: bool) -> None:
    terminal = Terminal()
    if as_json:
        terminal.show_json(SubmittedJobs(jobs=jobs))
        return
    for job in jobs:
        terminal.show(Text(f"{job.id}  {job.labels[SWEEP]}"))
    terminal.show(Text(f"{len(jobs)} jobs are stored. They wait in the queue: octet list"))


def clone(
    job_id: JobId,
    settings: Settings = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until it is over.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Submit a job's spec once more, with changes."""
    patch: dict[str, Any] = {}
    apply_settings(patch, settings or [])
    with connect(url) as client:
        _show_submitted(client, client.clone(find_to_read(client, job_id).id, patch), watch, as_json)


def _show_submitted(client: Client, job: Job, watch: bool, as_json: bool) -> None:
    terminal = Terminal()
    for setting in job.spec.precision.not_applied:
        terminal.complain(f"Ignored: {setting}.")
    if not watch:
        next_step = Text(f"{job.id} is {job.state.value}. Watch it with: octet watch {job.id}")
        terminal.show_json(job) if as_json else terminal.show(next_step)
        return
    if not as_json:
        terminal.show(Text(f"{job.id} is stored. Ctrl-C leaves it running."))
    _see_through(client, job.id, terminal, as_json)


def watch(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a job's progress until it is over; exit 0 if it succeeds."""
    with connect(url) as client:
        job = find_to_read(client, job_id)  # a wrong id or URL fails at once; later, a server that is away is waited for
        _see_through(client, job.id, Terminal(), as_json)


def validate(
    file: JobFile,
    settings: Settings = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no server: its pools and the data are not checked then.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Check a job file, here and by the server's rules, without submitting it."""
    document = load_job_file(file)
    apply_settings(document, settings or [])
    spec = check_spec(document, file)
    terminal, samples = Terminal(), "images" if spec.data.gives == "images" else "sequences"
    if offline:
        valid = Client.check(spec)
    else:
        with connect(url) as client:
            valid = client.validate(spec)
    if as_json:
        terminal.show_json(valid)
    else:
        terminal.show(
            Text(
                f"{file} is a valid job: {_size_words(valid)}; {valid.tokens_per_step:,} tokens a step in "
                f"{spec.batch.num_micro_batches} micro-batches of {valid.micro_batch_size} {samples} "
                f"on each of {spec.resources.workers} workers"
                f"{'' if valid.gradient_accumulation is None else f', with gradients in {valid.gradient_accumulation}'}. "
                f"Level {spec.precision.level}"
                f"{'' if valid.recipe is None else f': {valid.recipe}'}."
                f"{'' if valid.states is None else f' A rank holds {num_bytes(sum(valid.states.values()))}.'}"
            )
        )


def _size_words(valid: ValidatedJob) -> str:
    if valid.num_parameters is None or valid.num_block_weights is None:
        return "its parameters are counted when it starts"
    return f"{valid.num_parameters:,} parameters, {valid.num_block_weights:,} of them in block weights"


def pause(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Pause a job after a checkpoint; it frees its slots. Or a comparison, cmp_…, with all of its jobs."""
    with connect(url) as client:
        is_comparison = COMPARISON_ID.fullmatch(job_id)
        _show_state(client.pause_comparison(job_id) if is_comparison else client.pause(find_job(client, job_id).id), as_json)


def resume(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Put a paused job, or comparison, back into the queue; it goes on from its checkpoint."""
    with connect(url) as client:
        is_comparison = COMPARISON_ID.fullmatch(job_id)
        _show_state(client.resume_comparison(job_id) if is_comparison else client.resume(find_job(client, job_id).id), as_json)


def cancel(
    job_id: JobId,
    now: Annotated[bool, typer.Option("--now", help="Save no checkpoint first.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Cancel a job after a checkpoint, or a comparison, cmp_…, with all of its jobs."""
    with connect(url) as client:
        if COMPARISON_ID.fullmatch(job_id):
            _show_state(client.cancel_comparison(job_id, save=not now), as_json)
        else:
            _show_state(client.cancel(find_job(client, job_id).id, save=not now), as_json)


def retry(
    job_id: JobId,
    steps: Annotated[int | None, typer.Option("--steps", help="Go on to this step, later than the last one.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Let a job that failed or was cancelled go on from its checkpoint."""
    with connect(url) as client:
        _show_state(client.retry(find_job(client, job_id).id, steps=steps), as_json)


def change(
    job_id: JobId,
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="priority=70, labels.team=research")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a job's priority, labels, level or limit, as precision.level=O2; the value null removes a label or the limit."""
    patch: dict[str, Any] = {}
    apply_settings(patch, settings)
    with connect(url) as client:
        _show_state(client.change(find_job(client, job_id).id, patch), as_json)


def delete(
    job_id: JobId,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", metavar="ID", help="This checkpoint alone.")] = None,
    export: Annotated[str | None, typer.Option("--export", metavar="ID", help="This export alone.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete a job that is over, with its logs and checkpoints. Or a comparison, cmp_…, with its report; its jobs stay."""
    with connect(url) as client:
        if checkpoint is not None or export is not None:
            _delete_saved(client, job_id, checkpoint, export, yes=yes)
            return
        if COMPARISON_ID.fullmatch(job_id):
            if not yes:
                typer.confirm(f"Delete {job_id} with its report? Its jobs stay.", abort=True, err=True)
            client.delete_comparison(job_id)
            Terminal().show(Text(f"{job_id} is deleted."))
            return
        job = find_job(client, job_id)
        if not yes:
            typer.confirm(f"Delete {job.name} ({job.id}) with its logs and checkpoints?", abort=True, err=True)
        client.delete(job.id)
        Terminal().show(Text(f"{job.id} is deleted."))


def _delete_saved(client: Client, job_id: str, checkpoint: str | None, export: str | None, *, yes: bool) -> None:
    if checkpoint is not None and export is not None:
        raise typer.BadParameter("name a checkpoint or an export, not both.", param_hint="--export")
    job, name = find_job(client, job_id), checkpoint or export or ""
    if not yes:
        typer.confirm(f"Delete {name} of {job.name} ({job.id}) with its files?", abort=True, err=True)
    (client.delete_export if checkpoint is None else client.delete_checkpoint)(job.id, name)
    Terminal().show(Text(f"{name} is deleted."))


def _show_state(job: Job | Comparison, as_json: bool) -> None:
    terminal = Terminal()
    terminal.show_json(job) if as_json else terminal.show(Text(f"{job.id} is {job.state.value}."))


def _see_through(client: Client, job_id: str, terminal: Terminal, as_json: bool) -> None:
    """Stay until the job is over and exit as it did. Ctrl-C leaves; the job stays."""
    try:
        job = client.wait(job_id) if as_json else watch_jobs(client, [job_id], terminal)[0]
    except KeyboardInterrupt:
        terminal.complain(
            f"Detached: the job goes on. See it again with: octet watch {job_id}. End it with: octet cancel {job_id}"
        )
        raise typer.Exit(INTERRUPTED) from None
    terminal.show_json(job) if as_json else terminal.show(job_details(job, []))
    if job.state is not JobState.SUCCEEDED:
        raise typer.Exit(FAILED)


COMMANDS: Commands = {
    "submit": submit,
    "clone": clone,
    "validate": validate,
    "watch": watch,
    "pause": pause,
    "resume": resume,
    "cancel": cancel,
    "retry": retry,
    "change": change,
    "delete": delete,
}
