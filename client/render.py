"""Format the commands' output: tables without frames, which read the same on a terminal and in a file.

A table fits 80 columns: where a terminal is too narrow, the names and messages in it are cut, and no number or id.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from octet.api_schemas import Alert, Attempt, Checkpoint, Event, Export, Job, JobState, LogLine, Pool, QueuePlace
from octet.api_schemas.catalog import ModelFamily
from octet.api_schemas.comparison import Comparison
from octet.api_schemas.comparison_report import ComparisonReport
from octet.api_schemas.curve import Curve
from octet.api_schemas.evaluation import HALF_WIDTH
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.keys import ApiKey
from octet.api_schemas.levels import Level
from octet.api_schemas.plan import Fit, Plan, PlanRow
from octet.api_schemas.quotas import TenantUse
from octet.api_schemas.rows import Row
from octet.api_schemas.step_floor import StepFloor
from octet.client import reports
from octet.client.doctor import Checkup, Standing
from octet.client.text import duration, magnitude, num_bytes, number, one_line, plans_held, printable

STATE_STYLES = {
    JobState.QUEUED: "yellow",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "blue",
    JobState.PAUSING: "yellow",
    JobState.PAUSED: "yellow",
    JobState.CANCELLING: "magenta",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "magenta",
}


def table(*columns: str, right: Sequence[str] = (), cut: Sequence[str] = ()) -> Table:
    """A table without a frame; the columns in `right` hold numbers, those in `cut` may be cut (see `short`)."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        # rich takes room from columns that may wrap, before any other. Their cells are of one line all the same.
        grid.add_column(column, justify="right" if column in right else "left", no_wrap=column not in cut)
    return grid


def short(text: str) -> Text:
    """A cell of one line, whose end an ellipsis takes where it does not fit."""
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


def state_text(state: JobState) -> Text:
    return Text(state.value, style=STATE_STYLES[state])


def rows_table(rows: Sequence[Row], *, is_narrow: bool) -> Table:
    """Jobs at a glance. is_narrow: ids are as short as tells them apart, for a terminal; commands take them so."""
    ids = _short_ids([row.id for row in rows]) if is_narrow else [row.id for row in rows]
    grid = table("ID", "NAME", "LEVEL", "STATE", "STEP", "LOSS", "WHEN", right=("STEP", "LOSS"), cut=("NAME", "LEVEL"))
    for row, shown_id in zip(rows, ids, strict=True):
        steps = f"{number(row.step, 'd')}/{number(row.steps, 'd')}"
        loss = number(row.loss)
        grid.add_row(shown_id, short(row.name), short(row.level), state_text(row.state), steps, loss, _when(row))
    return grid


def reasons(rows: Iterable[Row]) -> Group:
    """A line for each job that waits or failed: why."""
    lines = []
    for row in rows:
        if row.why and row.state in (JobState.QUEUED, JobState.FAILED):
            what = "waits" if row.state is JobState.QUEUED else f"failed, {row.reason}"
            lines.append(short(f"{row.name} {what}: {row.why}"))
    return Group(*lines)


def alert_lines(alerts: Iterable[Alert]) -> Group:
    """A line for each alert: what is wrong, for how long, and where to read what to do."""
    lines = []
    for alert in alerts:
        lasts = "" if alert.since is None else f", for {age(alert.since)}"
        style = "bold red" if alert.severity == "critical" else "yellow"
        lines.append(Text(one_line(f"{alert.severity}: {alert.summary}{lasts}. {alert.runbook}"), style=style))
    return Group(*lines)


_SHORTEST_ID = len("job_") + 10
"""The time in an id has ten characters: shorter beginnings would stop telling jobs apart soon."""


def _short_ids(ids: Sequence[str]) -> list[str]:
    """Return the beginnings of ids, as long as tells them apart."""
    length = _SHORTEST_ID
    while len({each[:length] for each in ids}) < len(set(ids)):
        length += 1
    return [each[:length] for each in ids]


def _when(row: Row) -> str:
    if row.state is JobState.RUNNING and row.remaining_s is not None:
        return f"{duration(row.remaining_s)} left"
    return f"{age(row.finished_at or row.started_at or row.created_at)} ago"


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
        yield "starts", _start_words(job.queue)
    if job.reason:
        yield "reason", f"{job.reason}: {job.message or ''}".removesuffix(": ")
    elif job.message:
        yield "message", job.message
    if job.hint:
        yield "hint", job.hint
    if job.progress:
        yield "progress", progress_words(job)
    yield "tenant", job.tenant
    yield from _precision(job)
    yield "model", f"{spec.model.title}, {_num_parameters(job)} parameters"
    yield "data", spec.data.path
    yield "pool", f"{spec.resources.pool}, {_workers(job)}"
    yield (
        "attempts",
        f"{job.num_attempts}, {job.num_failures} failed{_failures(job)}; failures of its own are retried "
        f"{spec.retry.max_failures} times",
    )
    yield "created", moment(job.created_at)
    if job.started_at:
        yield "started", moment(job.started_at)
    if job.finished_at:
        yield "finished", moment(job.finished_at)
    if job.trace_id:
        yield "trace", job.trace_id
    if job.labels:
        yield "labels", ", ".join(f"{key}={value}" for key, value in job.labels.items())
    if checkpoints:
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.step)
        yield "checkpoints", f"{len(checkpoints)}, the newest at step {newest.step} ({num_bytes(newest.num_bytes)})"
    yield from _results(job)


def _start_words(place: QueuePlace) -> str:
    """Write when a queued job starts, and for how many slots it waits."""
    missing = place.missing_slots
    slots = "" if not missing else f"once {missing} slot{'s are' if missing > 1 else ' is'} free, "
    if place.starts_at is None:
        return f"{slots}at a time that is not known yet"
    return f"{slots}about {moment(place.starts_at)} at the latest"


def _failures(job: Job) -> str:
    """Write how many failures of each reason there were, and how many of these are tried again."""
    counts = [
        f"{each.reason.value} {each.count} of {'any number' if each.retries is None else each.retries}" for each in job.failures
    ]
    return f" ({', '.join(counts)})" if counts else ""


def _precision(job: Job) -> Iterable[tuple[str, str]]:
    """Yield the level, and if it was left to us; its recipe; and the plan by which the job was placed."""
    level, plan = job.spec.precision.level, job.plan
    is_chosen = plan is not None and plan.asked_level == "auto" != level
    yield "level", f"{level}, chosen for auto" if is_chosen else "auto, chosen before it starts" if level == "auto" else level
    if job.recipe is not None:
        yield "recipe", str(job.recipe)
    for setting in job.spec.precision.not_applied:
        yield "ignored", setting
    if plan is not None:
        yield "plan", _plan_words(plan)


def _plan_words(plan: JobPlan) -> str:
    memory = f"a device of {num_bytes(plan.memory_per_device_bytes)}"
    if plan.lower_bytes is None or plan.verdict == "unknown":
        return f"not known to fit {memory}: {plan.reason}"
    what = "states" if plan.peak_bytes is None else "peak"
    upper = "" if plan.upper_bytes is None else f" to {num_bytes(plan.upper_bytes)}"
    return f"{_ROOM[plan.verdict]}: {what} {num_bytes(plan.lower_bytes)}{upper}, {memory}"


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


def _measured(metrics: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    """Yield metrics by name, with their 95 % intervals where they have any."""
    for name, value in metrics.items():
        if not name.endswith(HALF_WIDTH):
            half_width = metrics.get(f"{name}{HALF_WIDTH}")
            yield name.replace("_", " "), share(value) + ("" if half_width is None else f" ± {share(half_width)}")


def share(value: float | None) -> str:
    """Write a metric: a share in percent, and another number, such as bits per byte, as it is."""
    return number(value, ".2%" if value is None or 0 <= value <= 1 else ".4g")


def _results(job: Job) -> Iterable[tuple[str, str]]:
    summary = job.summary
    if summary is None:
        return
    yield "final loss", number(summary.final_loss)
    yield "evaluation", f"loss {summary.evaluation_loss:.4f}, perplexity {summary.evaluation_perplexity:.3f}"
    yield from _measured(summary.evaluation_metrics)
    yield (
        "speed",
        f"{summary.tokens_per_s:,.0f} tokens/s, {summary.tokens:,} tokens in {duration(summary.train_time_s)}",
    )
    held = ", ".join(f"{name} {num_bytes(count)}" for name, count in summary.memory_bytes.items() if count)
    yield "memory", f"{num_bytes(sum(summary.memory_bytes.values()))}: {held}"
    if summary.peak_memory_bytes is not None:
        reserved = "" if summary.reserved_memory_bytes is None else f", {num_bytes(summary.reserved_memory_bytes)} reserved"
        yield "peak", f"{num_bytes(summary.peak_memory_bytes)} allocated{reserved}"
    if job.measured_to_planned is not None:
        yield (
            "measured",
            f"{job.measured_to_planned:.1%} of the plan's {'states' if summary.peak_memory_bytes is None else 'peak'}",
        )
    if summary.step_time_s is not None:
        predicted = None if job.plan is None else job.plan.predicted_step
        beside = "" if predicted is None else f", predicted {predicted.least_s:.3g} to {predicted.most_s:.3g} s"
        yield "step", f"{summary.step_time_s:.3g} s, the median{beside}"
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
    numbers = ("#", "FROM STEP", "TO STEP", "STARTED IN")
    grid = table("#", "STATE", "NODE", "DEVICE", *numbers[1:], "REASON", right=numbers, cut=("NODE", "DEVICE", "REASON"))
    for attempt in attempts:
        start_s = (attempt.first_step_at - attempt.created_at).total_seconds() if attempt.first_step_at else None
        grid.add_row(
            str(attempt.epoch),
            attempt.state.value,
            short(attempt.node or "–"),
            short(attempt.device or "–"),
            number(attempt.resumed_from_step, "d"),
            number(attempt.last_step, "d"),
            duration(start_s),
            short(f"{attempt.reason}: {attempt.message or ''}" if attempt.reason else "–"),
        )
    return grid


def checkpoints_table(checkpoints: Iterable[Checkpoint]) -> Table:
    grid = table("ID", "STEP", "SIZE", "LOSS", "CREATED", right=("STEP", "SIZE", "LOSS"))
    for item in checkpoints:
        at = item.created_at.astimezone().strftime("%Y-%m-%d %H:%M")
        grid.add_row(item.id, str(item.step), num_bytes(item.num_bytes), number(item.loss), at)
    return grid


def exports_table(exports: Iterable[Export]) -> Table:
    """A row for each export: KL divergence in nats, and the share of tokens with the same first choice, both as served."""
    rows = list(exports)
    elsewhere = ("ADDRESS",) if any(item.address for item in rows) else ()
    grid = table("NAME", "STEP", "SIZE", "KL", "SAME TOP", "CREATED", *elsewhere, right=("STEP", "SIZE", "KL", "SAME TOP"))
    for item in rows:
        found = item.mismatch.evaluation if item.mismatch is not None else None
        distance = ("–", "–") if found is None else (f"{found.kl_divergence:.3g}", f"{found.top1_agreement:.2%}")
        at = item.created_at.astimezone().strftime("%Y-%m-%d %H:%M")
        address = (item.address or "–",) if elsewhere else ()
        grid.add_row(item.name, str(item.step), num_bytes(item.num_bytes), *distance, at, *address)
    return grid


def curve_table(curve: Curve) -> Table:
    """A row for each bucket of steps: losses are means over it, and the learning rate is that of its last step."""
    evaluated = {_bucket(curve, step): place for place, step in enumerate(curve.evaluations.step)}
    names = [name for name in curve.evaluations.metrics if not name.endswith(HALF_WIDTH)]
    columns = ("STEP", "LOSS", "EVAL LOSS", *map(_column_of, names), "GRAD NORM", "RATE", "TOKENS/S", "WAIT")
    grid = table(*columns, right=columns)
    for row, step in enumerate(curve.step):
        place, time_s, steps = evaluated.get(_bucket(curve, step)), curve.step_time_s[row], curve.num_steps[row]
        grid.add_row(
            str(step),
            number(curve.loss[row]),
            number(None if place is None else curve.evaluations.loss[place]),
            *(share(None if place is None else curve.evaluations.metrics[name][place]) for name in names),
            number(curve.gradient_norm[row], ".3f"),
            number(curve.learning_rate[row], ".2e"),
            number(curve.tokens[row] / time_s if time_s else None, ",.0f"),
            duration(curve.data_wait_s[row] / steps),
        )
    return grid


def comparison_table(names: Sequence[str], curves: Sequence[Curve]) -> Table:
    """Losses of several jobs in buckets of equal width, and what each differs from the first."""
    columns = [names[0], *(column for name in names[1:] for column in (name, "DIFF"))]
    grid = table("STEP", *(column.upper() for column in columns), right=("STEP", *map(str.upper, columns)))
    first, *others = [_losses(curve) for curve in curves]
    evaluated, *others_evaluated = [_evaluations(curve) for curve in curves]
    for bucket, loss in first.items():
        end = max(step for curve in curves for step in curve.step if _bucket(curve, step) == bucket)
        grid.add_row(str(end), number(loss), *(cell for other in others for cell in _beside(loss, other.get(bucket))))
    for step in list(evaluated)[-1:]:
        cells = [cell for other in others_evaluated for cell in _beside(evaluated[step], other.get(step))]
        grid.add_row(f"eval {step}", number(evaluated[step]), *cells, style="bold")
    return grid


def _losses(curve: Curve) -> dict[int, float | None]:
    return {_bucket(curve, step): loss for step, loss in zip(curve.step, curve.loss, strict=True)}


def _evaluations(curve: Curve) -> dict[int, float | None]:
    return dict(zip(curve.evaluations.step, curve.evaluations.loss, strict=True))


def _beside(first: float | None, other: float | None) -> tuple[str, str]:
    return number(other), number(other / first - 1 if other is not None and first else None, "+.2%")


def _bucket(curve: Curve, step: int) -> int:
    """Return the number of a step's bucket, counted from 1."""
    return -(-step // curve.step_by)


def _column_of(metric: str) -> str:
    """Return a column's title: top1_accuracy is TOP1 ACC."""
    return metric.replace("_", " ").replace("accuracy", "acc").upper()


def comparison_details(report: ComparisonReport, left_out: Sequence[str]) -> Group:
    """A table with a row for each arm, then the verdicts."""
    rows = reports.arms(report)
    grid = table(*rows.columns, right=rows.columns[1:], cut=("ARM",))
    for name, *cells in rows.rows:
        grid.add_row(short(name), *cells)
    return Group(grid, *(Text(printable(line)) for line in reports.verdicts(report, left_out)))


def comparisons_table(comparisons: Iterable[Comparison]) -> Table:
    """Comparisons at a glance, newest first."""
    grid = table("ID", "NAME", "STATE", "ARMS", "SEEDS", "WHEN", right=("ARMS", "SEEDS"), cut=("NAME",))
    for each in comparisons:
        when = f"{age(each.finished_at or each.created_at)} ago"
        grid.add_row(each.id, short(each.name), each.state.value, str(len(each.spec.arms)), str(each.spec.seeds), when)
    return grid


def models_table(families: Sequence[ModelFamily]) -> Group:
    """Presets with parameters and bytes; a column stands for all levels whose bytes read alike for every preset."""
    presets = [(family.family, preset) for family in families for preset in family.presets]
    columns: dict[tuple[str, ...], list[str]] = {}
    for level in presets[0][1].bytes_by_level if presets else ():
        columns.setdefault(tuple(num_bytes(preset.bytes_by_level[level]) for _, preset in presets), []).append(level)
    names = [f"{levels[0]}, …" if len(levels) > 1 else levels[0] for levels in columns.values()]
    grid = table("PRESET", "PARAMS", *names, right=("PARAMS", *names))
    for row, (family, preset) in enumerate(presets):
        sizes = (bytes_of_presets[row] for bytes_of_presets in columns)
        name = preset.name if preset.name.startswith(family) else f"{preset.name} ({family})"
        grid.add_row(name, magnitude(preset.num_parameters), *sizes)
    others = [
        Text(f"{entry.family}  {sum(map(len, entry.architectures.values()))} architectures; --json lists them")
        if entry.architectures
        else Text(f"{entry.family}  your own network; docs/own-models.md")
        for entry in families
        if entry.architectures or not entry.presets
    ]
    return Group(grid, *others)


def levels_table(levels: Iterable[Level]) -> Table:
    """List the formats in which each level stores things. Long names take two lines, so that the table fits 80 columns."""
    columns = ("LEVEL", "GEMM", "WEIGHT", "MASTER", "GRADIENT", "ADAM M", "ADAM V", "BYTES")
    grid = table(*columns, right=("BYTES",))
    for row in levels:
        sent = row.gradient_communication
        gradient = sent if row.weight_gradient == sent else f"{row.weight_gradient},\nsent {sent}"
        formats = (row.weight, row.master_weight, gradient, row.exp_avg, row.exp_avg_sq)
        cells = (row.name, row.gemm, *formats, f"≤ {row.bytes_per_parameter:g}")
        grid.add_row(*(_on_two_lines(cell) if len(cell) > _WIDEST_FORMAT else cell for cell in cells))
    return grid


_WIDEST_FORMAT = 10


def _on_two_lines(name: str) -> str:
    """Break a name behind its last hyphen."""
    start, _, end = name.rpartition("-")
    return f"{start}-\n{end}" if start else name


def pools_table(pools: Iterable[Pool]) -> Group:
    """A table with a row for each pool, then how the plans of their jobs held."""
    columns = ("POOL", "ACCELERATOR", "SLOTS", "THERE", "USED", "QUEUED", "LIVE", "MEMORY", "THREADS")
    grid, notes = table(*columns, right=columns[2:], cut=("POOL",)), []
    for pool in pools:
        there = "–" if pool.slots_present is None else pool.slots_present
        counts = (pool.slots, there, pool.slots_used, pool.jobs_queued, pool.jobs_live)
        memory = num_bytes(pool.memory_per_device_bytes)
        grid.add_row(short(pool.name), pool.accelerator, *map(str, counts), memory, str(pool.threads_per_worker))
        if held := plans_held(pool):
            notes.append(f"{short(pool.name)}: {held}")
    return Group(grid, *map(Text, notes))


def usage_table(tenants: Iterable[TenantUse]) -> Group:
    """A table with a row for each pool of each tenant, then their storage. Each figure stands beside its limit, if any."""
    columns = ("TENANT", "POOL", "SLOTS", "JOBS", "SLOT HOURS")
    grid, notes = table(*columns, right=columns[2:], cut=("POOL",)), []
    for tenant in tenants:
        for pool in tenant.pools:
            limits = ((pool.slots, pool.most_slots), (pool.jobs, pool.most_jobs), (pool.slot_hours, pool.most_slot_hours))
            figures = [_of_limit(used, most, lambda each: f"{each:,.4g}") for used, most in limits]
            grid.add_row(tenant.tenant, short(pool.pool), *figures)
        storage = _of_limit(tenant.storage_bytes, tenant.most_storage_bytes, num_bytes)
        notes.append(f"{tenant.tenant}: storage {storage}; slot hours count from 0 on {moment(tenant.month_ends_at)}")
    return Group(grid, *map(Text, notes))


def _of_limit(used: float, most: float | None, write: Callable[[Any], str]) -> str:
    return write(used) if most is None else f"{write(used)} of {write(most)}"


def keys_table(keys: Iterable[ApiKey], now: datetime) -> Table:
    """One line for each key. USED: how long ago, to the minute."""
    grid = table("ID", "NAME", "TENANT", "ROLE", "USED", "WORKS", right=("USED",), cut=("NAME",))
    for key in keys:
        used = "–" if key.used_at is None else age(key.used_at)
        grid.add_row(key.id, short(key.name), key.tenant, key.role.value, used, _works(key, now))
    return grid


def _works(key: ApiKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "always"
    return "expired" if key.expires_at <= now else f"to {key.expires_at.astimezone():%Y-%m-%d}"


def checkup_table(checkup: Checkup) -> Table:
    """One line for each thing that was looked at, and below it what to do."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checkup.checks:
        mark, style = _MARKS[check.standing]
        grid.add_row(Text(mark, style=style), check.part, one_line(check.found))
        if check.hint:
            grid.add_row("", "", Text(one_line(check.hint), style=style))
    return grid


_MARKS: dict[Standing, tuple[str, str]] = {"ok": ("ok", "green"), "note": ("–", "yellow"), "bad": ("BAD", "bold red")}


class Lines:
    """Format events and log lines: the time of day, and a line of its own where a new day begins."""

    def __init__(self, *, has_several_ranks: bool = False) -> None:
        self._has_several_ranks = has_several_ranks
        self._day: date | None = None

    def event(self, event: Event) -> Text:
        by = "" if event.actor is None or event.actor == "octet" or event.actor.startswith("rank ") else f" (by {event.actor})"
        return self._line(event.at, f"{event.type:<22}  {one_line(event.message + by)}")

    def log(self, line: LogLine) -> Text:
        """Name the rank where there are several, and the level where it is not INFO."""
        rank = f"rank {line.rank:<3}  " if self._has_several_ranks else ""
        level = "" if line.level == "INFO" else f"{line.level}  "
        style = _LOG_STYLES.get(line.level, "")
        return self._line(line.at, f"{rank}{level}{printable(line.message)}", style)

    def _line(self, at: datetime, message: str, style: str = "") -> Text:
        local = at.astimezone()
        is_new, self._day = local.date() != self._day, local.date()
        day = Text(f"{local:%A, %Y-%m-%d, %Z}\n", style="dim") if is_new else Text()
        # What a message has more than one line of stands below its beginning.
        indented = message.replace("\n", "\n" + " " * 10)
        return day.append(f"{local:%H:%M:%S}", style="dim").append(f"  {indented}", style=style)


_LOG_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


def moment(at: datetime) -> str:
    """Write a time in the reader's zone, and name the zone. JSON has UTC."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def age(at: datetime) -> str:
    """Write how long ago a time was, by its largest unit: 5 s, 3 min, 7 h, 12 d."""
    seconds = max(0, round((datetime.now(UTC) - at).total_seconds()))
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s} {unit}"
    return f"{seconds} s"


def plan_details(plan: Plan, level: str | None = None) -> Group:
    """A table with a row for each level, then the details of one, what would make the job fit, and what is not known.

    level: the job's own, whose details are shown, or those of the level that is chosen for auto; of all rows without either.
    """
    right = ("WEIGHTS", "MASTERS", "GRADS", "MOMENTS", "STEP", "PEAK", "SENT")
    in_pool = [next((fit for fit in row.fits if fit.pool == plan.pool), None) for row in plan.rows]
    of_pool = ("FITS", "BATCH", "SECONDS") if any(in_pool) else ()
    grid = table("LEVEL", *right, *of_pool, right=(*right, "BATCH"))
    for row, fit in zip(plan.rows, in_pool, strict=True):
        states = row.states or {}
        moments = sum(states[kind] for kind in ("exp_avg", "exp_avg_sq")) if states else None
        held = [states.get(kind) for kind in ("weights", "master_weights", "gradients")]
        sent = None if row.sent_bytes is None else sum(sum(by_dtype.values()) for by_dtype in row.sent_bytes.values())
        sizes = map(num_bytes, (*held, moments, row.step_bytes, row.peak_bytes, sent))
        grid.add_row(row.level, *sizes, *(_fit_cells(fit) if of_pool else ()))
    shown = [row for row in plan.rows if row.level in (level, plan.chosen_level)] or plan.rows
    lines = [*_layer_lines(plan.rows), *_peak_lines(shown), *(line for row in shown for line in _fit_lines(row, plan))]
    if plan.chosen_level is not None:
        lines.append(f"precision.level auto is {plan.chosen_level}.")
    if plan.changes:
        lines.append("It would fit with one of these, cheapest first:")
        lines += [f"  {row.change} (peak {num_bytes(row.peak_bytes)})" for row in plan.changes]
    notes = _by_words((row.level, row.reason) for row in plan.rows)
    return Group(grid, *(Text(line) for line in (*lines, *notes, *plan.missing)))


_ROOM = {
    "yes": "fits",
    "tight": "fits or not, by what CUDA and NCCL take",
    "no": "does not fit",
    "unknown": "has room for the states",
}


_FITS = {"yes": "fits", "tight": "maybe", "no": "no", "unknown": "states do"}


def _fit_cells(fit: Fit | None) -> tuple[str, str, str]:
    """Return the cells of a row about the job's pool: room, largest micro-batch, and the predicted seconds of a step."""
    if fit is None:
        return "–", "–", "–"
    batch = "–" if fit.largest_micro_batch is None else f"{fit.largest_micro_batch:,}"
    seconds = "–" if fit.floor is None else f"≥ {fit.floor.step_s:.2g}"
    if fit.predicted is not None:
        seconds = f"{fit.predicted.least_s:.2g} to {fit.predicted.most_s:.2g}"
    return _FITS[fit.verdict], batch, seconds


def _layer_lines(rows: Sequence[PlanRow]) -> Iterable[str]:
    """Write which layers are converted."""

    def words(row: PlanRow) -> str | None:
        left = "; ".join(f"{number} left in 16 bits, {reason}" for reason, number in (row.left_layers or {}).items())
        converted = f"{row.converted_layers} linear layers converted{f'; {left}' if left else ''}"
        return None if row.converted_layers is None else converted

    return _by_words((row.level, words(row)) for row in rows)


def _by_words(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    """Write the words about each level, once for all levels with the same ones."""
    levels: dict[str, list[str]] = {}
    for level, words in rows:
        if words:
            levels.setdefault(words, []).append(level)
    return [f"{', '.join(names)}: {words}" for words, names in levels.items()]


def _peak_lines(rows: Sequence[PlanRow]) -> Iterable[str]:
    """Write by class what is alive at each peak that is known, the most first."""
    for row in rows:
        found = sorted((row.peak_by_class or {}).items(), key=lambda item: -item[1])
        held = ", ".join(f"{kind.replace('_', ' ')} {num_bytes(count)}" for kind, count in found if count)
        if held:
            yield f"{row.level} at the peak: {held}"
        for axis, by_collective in (row.exchanged_bytes or {}).items():
            sent = {name: num_bytes(sum(by_dtype.values())) for name, by_dtype in by_collective.items()}
            yield f"  sent on axis {axis} in a step: {', '.join(f'{name} {size}' for name, size in sent.items())}"
        for stage in row.stages if held else ():
            peak = "" if stage.peak_bytes is None else f", peak {num_bytes(stage.peak_bytes)}"
            states = num_bytes(sum(stage.states.values()))
            yield f"  rank {stage.pipeline_rank} of the pipeline: {stage.num_blocks} blocks, states {states}{peak}"


def _fit_lines(row: PlanRow, plan: Plan) -> Iterable[str]:
    for fit in row.fits:
        room = "free" if fit.free_bytes >= 0 else "missing"
        line = f"{row.level} in pool {fit.pool}: {_ROOM[fit.verdict]}, {num_bytes(abs(fit.free_bytes))} {room}"
        if fit.largest_micro_batch is not None:
            line += f"; largest micro-batch {fit.largest_micro_batch}, now {plan.micro_batch_size}"
        yield line
        if fit.floor is not None:
            yield f"  at least {_least(fit.floor)}"
        if fit.predicted is not None:
            yield f"  predicted {fit.predicted.least_s:.3g} to {fit.predicted.most_s:.3g} s a step"


def _least(floor: StepFloor) -> str:
    """Say how long a job takes at least, and what it costs."""
    parts = [f"{floor.step_s:.3g} s a step (at most {floor.peak_share:.0%} of the device's bf16 peak)"]
    if floor.hours is not None:
        parts.append(f"{floor.hours:,.3g} hours to the end")
    if floor.price is not None:
        parts.append(f"a price of {floor.price:,.2f}")
    return ", ".join(parts)
