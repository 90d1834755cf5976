"""Format the commands' output: tables without frames, which read the same on a terminal and in a file."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from octet.api_schemas import Attempt, Checkpoint, Event, Job, JobState, LogLine, MetricPoint, Pool
from octet.api_schemas.catalog import ModelFamily
from octet.api_schemas.levels import Level
from octet.client.text import duration, num_bytes, number, one_line, printable

STATE_STYLES = {
    JobState.QUEUED: "yellow",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "blue",
    JobState.CANCELLING: "magenta",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "magenta",
}


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without a frame; the columns in `right` hold numbers."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return grid


def state_text(state: JobState) -> Text:
    return Text(state.value, style=STATE_STYLES[state])


def jobs_table(jobs: Iterable[Job]) -> Table:
    grid = table("ID", "NAME", "LEVEL", "STATE", "STEP", "LOSS", "POOL", "CREATED", right=("STEP", "LOSS"))
    for job in jobs:
        step, loss = (str(job.progress.step), number(job.progress.loss)) if job.progress else ("–", "–")
        level, pool = job.spec.precision.level, job.spec.resources.pool
        steps = f"{step}/{number(num_steps(job), 'd')}"
        grid.add_row(job.id, job.name, level, state_text(job.state), steps, loss, pool, moment(job.created_at))
    return grid


def job_details(job: Job, checkpoints: Sequence[Checkpoint]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("id", job.id)
    grid.add_row("name", job.name)
    grid.add_row("state", state_text(job.state))
    for field, value in _facts(job, checkpoints):
        grid.add_row(field, one_line(value))
    return grid


def _facts(job: Job, checkpoints: Sequence[Checkpoint]) -> Iterable[tuple[str, str]]:
    spec = job.spec
    if job.queue:
        yield "waits", f"number {job.queue.position} in pool {spec.resources.pool}: {job.queue.why}"
    if job.reason:
        yield "reason", f"{job.reason}: {job.message or ''}".removesuffix(": ")
    elif job.message:
        yield "message", job.message
    if job.hint:
        yield "hint", job.hint
    if job.progress:
        yield "progress", progress_words(job)
    yield "tenant", job.tenant
    yield "level", spec.precision.level
    if job.recipe is not None:
        yield "recipe", str(job.recipe)
    for setting in spec.precision.not_applied:
        yield "ignored", setting
    yield "model", f"{spec.model.title}, {_num_parameters(job)} parameters"
    yield "data", spec.data.path
    yield "pool", f"{spec.resources.pool}, {_workers(job)}"
    yield "attempts", f"{job.num_attempts}, failed {job.num_failures} of at most {spec.retry.max_failures} retried"
    yield "created", moment(job.created_at)
    if job.started_at:
        yield "started", moment(job.started_at)
    if job.finished_at:
        yield "finished", moment(job.finished_at)
    if job.labels:
        yield "labels", ", ".join(f"{key}={value}" for key, value in job.labels.items())
    if checkpoints:
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.step)
        yield "checkpoints", f"{len(checkpoints)}, the newest at step {newest.step} ({num_bytes(newest.num_bytes)})"
    yield from _results(job)


def _workers(job: Job) -> str:
    """Return the number of requested ranks; for an elastic job also the present number."""
    asked = job.spec.resources
    if asked.min_workers is None:
        return f"{asked.workers} worker{'s' if asked.workers > 1 else ''}"
    now = "" if job.num_ranks is None else f", now {job.num_ranks}"
    return f"{asked.min_workers} to {asked.workers} workers{now}"


def _num_parameters(job: Job) -> str:
    """Count by the family's contract, or else as the rank counted. A dash until then."""
    counted = job.spec.model.sizes.num_parameters
    if counted is None and job.summary is not None:
        counted = job.summary.num_parameters
    return number(counted, ",d")


def _results(job: Job) -> Iterable[tuple[str, str]]:
    summary = job.summary
    if summary is None:
        return
    yield "final loss", number(summary.final_loss)
    yield "evaluation", f"loss {summary.evaluation_loss:.4f}, perplexity {summary.evaluation_perplexity:.3f}"
    for name, value in summary.evaluation_metrics.items():
        yield name.replace("_", " "), f"{value:.2%}"
    yield (
        "speed",
        f"{summary.tokens_per_s:,.0f} tokens/s, {summary.tokens:,} tokens in {duration(summary.train_time_s)}",
    )
    held = ", ".join(f"{name} {num_bytes(count)}" for name, count in summary.memory_bytes.items() if count)
    yield "memory", f"{num_bytes(sum(summary.memory_bytes.values()))}: {held}"
    if summary.host_memory_bytes:
        yield "host memory", num_bytes(summary.host_memory_bytes)


def num_steps(job: Job) -> int | None:
    """The steps that the job takes; None until a rank has counted those of its epochs."""
    return job.progress.steps if job.progress else job.spec.training.steps


def progress_words(job: Job) -> str:
    """Step, loss, speed and time left, or why it waits, as one line."""
    if job.progress is None:
        return job.queue.why if job.queue else ""
    seen = job.progress
    words = [f"step {seen.step}/{seen.steps}", f"loss {number(seen.loss)}"]
    if seen.tokens_per_s is not None:
        words.append(f"{seen.tokens_per_s:,.0f} tokens/s")
    if seen.remaining_s is not None and not job.state.is_terminal:
        words.append(f"{duration(seen.remaining_s)} left")
    return ", ".join(words)


def attempts_table(attempts: Iterable[Attempt]) -> Table:
    columns = ("ID", "EPOCH", "STATE", "NODE", "DEVICE", "FROM STEP", "LAST STEP", "FIRST STEP AFTER", "REASON")
    grid = table(*columns, right=("EPOCH", "FROM STEP", "LAST STEP", "FIRST STEP AFTER"))
    for attempt in attempts:
        start_s = (attempt.first_step_at - attempt.created_at).total_seconds() if attempt.first_step_at else None
        grid.add_row(
            attempt.id,
            str(attempt.epoch),
            attempt.state.value,
            attempt.node or "–",
            attempt.device or "–",
            number(attempt.resumed_from_step, "d"),
            number(attempt.last_step, "d"),
            duration(start_s),
            one_line(f"{attempt.reason}: {attempt.message or ''}") if attempt.reason else "–",
        )
    return grid


def checkpoints_table(checkpoints: Iterable[Checkpoint]) -> Table:
    grid = table("ID", "STEP", "SIZE", "LOSS", "CREATED", right=("STEP", "SIZE", "LOSS"))
    for item in checkpoints:
        grid.add_row(item.id, str(item.step), num_bytes(item.num_bytes), number(item.loss), moment(item.created_at))
    return grid


def metrics_table(points: Iterable[MetricPoint]) -> Table:
    points = list(points)
    names = list(dict.fromkeys(name for point in points for name in point.evaluation_metrics))
    of_evaluation = ("EVALUATION LOSS", *(name.replace("_", " ").upper() for name in names))
    columns = ("STEP", "LOSS", *of_evaluation, "GRADIENT NORM", "LEARNING RATE", "TOKENS/S", "DATA WAIT")
    grid = table(*columns, right=columns)
    for point in points:
        grid.add_row(
            str(point.step),
            number(point.loss),
            number(point.evaluation_loss),
            *(number(point.evaluation_metrics.get(name), ".2%") for name in names),
            number(point.gradient_norm, ".3f"),
            number(point.learning_rate, ".3e"),
            number(point.tokens_per_s, ",.0f"),
            duration(point.data_wait_s),
        )
    return grid


def models_table(families: Sequence[ModelFamily]) -> Table:
    """Presets with parameters and bytes; a column stands for all levels that take the same bytes for every preset."""
    presets = [(family.family, preset) for family in families for preset in family.presets]
    columns: dict[tuple[int, ...], list[str]] = {}
    for level in presets[0][1].bytes_by_level if presets else ():
        columns.setdefault(tuple(preset.bytes_by_level[level] for _, preset in presets), []).append(level)
    names = [f"{levels[0]}, …" if len(levels) > 1 else levels[0] for levels in columns.values()]
    grid = table("FAMILY", "PRESET", "PARAMETERS", *names, right=("PARAMETERS", *names))
    for row, (family, preset) in enumerate(presets):
        sizes = (num_bytes(bytes_of_presets[row]) for bytes_of_presets in columns)
        grid.add_row(family, preset.name, f"{preset.num_parameters:,}", *sizes)
    for entry in families:
        if entry.architectures:
            count = sum(map(len, entry.architectures.values()))
            grid.add_row(entry.family, f"{count} architectures", number(None), *(number(None) for _ in names))
        elif not entry.presets:
            grid.add_row(entry.family, "your own network", number(None), *(number(None) for _ in names))
    return grid


def levels_table(levels: Iterable[Level]) -> Table:
    columns = (
        "LEVEL",
        "GEMM",
        "GRADIENT COMM",
        "WEIGHT",
        "MASTER",
        "WEIGHT GRADIENT",
        "ADAM M",
        "ADAM V",
        "BYTES/PARAM",
    )
    grid = table(*columns, right=("BYTES/PARAM",))
    for row in levels:
        grid.add_row(
            row.name,
            row.gemm,
            row.gradient_communication,
            row.weight,
            row.master_weight,
            row.weight_gradient,
            row.exp_avg,
            row.exp_avg_sq,
            f"≤ {row.bytes_per_parameter:g}",
        )
    return grid


def pools_table(pools: Iterable[Pool]) -> Table:
    columns = ("POOL", "ACCELERATOR", "SLOTS", "USED", "QUEUED", "LIVE", "MEMORY/DEVICE", "THREADS/WORKER")
    grid = table(*columns, right=columns[2:])
    for pool in pools:
        counts = (pool.slots, pool.slots_used, pool.jobs_queued, pool.jobs_live)
        memory = num_bytes(pool.memory_per_device_bytes)
        grid.add_row(pool.name, pool.accelerator, *map(str, counts), memory, str(pool.threads_per_worker))
    return grid


def event_line(event: Event) -> Text:
    return Text(f"{moment(event.at)}  {event.seq:>4}  {event.type:<24}  {one_line(event.message)}")


def log_line(line: LogLine) -> Text:
    return Text(f"{moment(line.at)}  rank {line.rank}  {line.level:<7}  {printable(line.message)}")


def moment(at: datetime) -> str:
    """Write a time in the reader's zone, and name the zone. JSON has UTC."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
