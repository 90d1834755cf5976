"""Compare the same job at several levels, side by side, at the end of the demo.

All jobs here have succeeded; the others are compared with the first.
"""

from collections.abc import Iterator, Sequence

from rich.table import Table

from octet.api_schemas import Job, JobSummary
from octet.client.demo.job import JUDGED_FROM_STEPS
from octet.client.render import table
from octet.client.text import duration, number

MEMORY_CLASSES = ("weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq", "scales", "other")
LARGEST_SHARE_OF_ENTROPY = 0.8


def summary_of(job: Job) -> JobSummary:
    """The result of a job that succeeded."""
    assert job.summary is not None, f"{job.id} is {job.state} and has no summary"
    return job.summary


def has_learned(summary: JobSummary) -> bool:
    """Return True if the loss is below that of byte frequencies alone."""
    return _share_of_entropy(summary) <= LARGEST_SHARE_OF_ENTROPY


def learning_line(jobs: Sequence[Job]) -> str:
    """The rule of `has_learned`, and what each job reached, in one line."""
    entropy_nats = _entropy_nats(jobs)
    losses = ", ".join(f"{_reached(job)} ({'yes' if has_learned(summary_of(job)) else 'NO'})" for job in jobs)
    return (
        f"Byte-unigram entropy of the evaluation text: {entropy_nats:.3f} nats. Evaluation loss has to be at most "
        f"{LARGEST_SHARE_OF_ENTROPY:.0%} of it, {LARGEST_SHARE_OF_ENTROPY * entropy_nats:.3f}: {losses}."
    )


def too_short_line(jobs: Sequence[Job]) -> str:
    """Describe, in one line, the losses of jobs with too few steps to judge, and the goal of longer ones."""
    entropy_nats = _entropy_nats(jobs)
    shares = ", ".join(f"{_reached(job)} ({_share_of_entropy(summary_of(job)):.0%})" for job in jobs)
    return (
        f"{jobs[0].spec.training.steps} steps are too few to judge what a model learns. Evaluation loss, and its share of the "
        f"evaluation text's byte-unigram entropy of {entropy_nats:.3f} nats: {shares}. From {JUDGED_FROM_STEPS} steps on "
        f"it has to be at most {LARGEST_SHARE_OF_ENTROPY:.0%}."
    )


def _entropy_nats(jobs: Sequence[Job]) -> float:
    return summary_of(jobs[0]).data["unigram_entropy_nats"]


def _share_of_entropy(summary: JobSummary) -> float:
    return summary.evaluation_loss / summary.data["unigram_entropy_nats"]


def _reached(job: Job) -> str:
    return f"{job.spec.precision.level} {summary_of(job).evaluation_loss:.3f}"


def side_by_side(jobs: Sequence[Job]) -> Table:
    """A column per job, a row per quantity."""
    levels = [job.spec.precision.level for job in jobs]
    grid = table("", *levels, right=levels)
    for name, values in _quantities([summary_of(job) for job in jobs]):
        grid.add_row(name, *values)
    return grid


def _quantities(summaries: Sequence[JobSummary]) -> Iterator[tuple[str, list[str]]]:
    yield "final training loss", [number(summary.final_loss) for summary in summaries]
    yield "evaluation loss", [number(summary.evaluation_loss) for summary in summaries]
    yield "evaluation perplexity", [number(summary.evaluation_perplexity, ".3f") for summary in summaries]
    for name in summaries[0].evaluation_metrics:
        values = [summary.evaluation_metrics.get(name) for summary in summaries]
        yield f"evaluation {name.replace('_', ' ')}", [number(value, ".3f") for value in values]
    yield "tokens/s", [number(summary.tokens_per_s, ",.0f") for summary in summaries]
    yield "training time", [duration(summary.train_time_s) for summary in summaries]
    yield "bytes per parameter", ["" for _ in summaries]
    for name in MEMORY_CLASSES:
        counts = [summary.memory_bytes.get(name, 0) / summary.num_parameters for summary in summaries]
        yield f"  {name}", [number(count, ".2f") for count in counts]
    totals = [bytes_per_parameter(summary) for summary in summaries]
    yield "  total", [number(total, ".2f") for total in totals]
    yield "  saving", _savings(totals)
    converted = [converted_bytes_per_parameter(summary) for summary in summaries]
    yield "  in converted layers", [number(count, ".2f") for count in converted]
    yield "  saving there", _savings(converted)


def bytes_per_parameter(summary: JobSummary) -> float:
    return sum(summary.memory_bytes.values()) / summary.num_parameters


def converted_bytes_per_parameter(summary: JobSummary) -> float | None:
    """None where the level converts nothing."""
    if not summary.num_converted_parameters:
        return None
    return sum(summary.converted_memory_bytes.values()) / summary.num_converted_parameters


def _savings(counts: Sequence[float | None]) -> list[str]:
    first = counts[0] if counts else None
    if not first:
        return ["–" for _ in counts]
    return ["–" if count is None or count is first else f"{1 - count / first:.0%}" for count in counts]


def verdict(jobs: Sequence[Job]) -> str:
    """The bytes that each level holds and the loss that it reaches, compared with the first, in one line."""
    first, *others = jobs
    yardstick, level = summary_of(first), first.spec.precision.level
    phrases = [f"{level} holds {bytes_per_parameter(yardstick):.2f} bytes per parameter"]
    for job in others:
        summary = summary_of(job)
        saving = 1 - bytes_per_parameter(summary) / bytes_per_parameter(yardstick)
        gap = summary.evaluation_loss / yardstick.evaluation_loss - 1
        held = f"{job.spec.precision.level} {bytes_per_parameter(summary):.2f} ({saving:.0%} less)"
        phrases.append(f"{held} at {gap:+.2%} evaluation loss")
    return f"{', '.join(phrases)}."


def start_times(jobs: Sequence[Job]) -> Table:
    """Seconds from the acceptance of each job until each phase of its start."""
    phases = ("placed", "process up", "torch imported", "model built", "first step")
    grid = table("seconds after accepted", *phases, right=phases)
    for job in jobs:
        if job.start is None:
            continue
        start = job.start
        imported_at, built_at = start.torch_imported_at, start.model_built_at
        reached_at = (start.placed_at, start.process_up_at, imported_at, built_at, start.first_step_at)
        waits = [(at - start.accepted_at).total_seconds() if at else None for at in reached_at]
        grid.add_row(job.name, *(number(wait_s, ".2f") for wait_s in waits))
    return grid
