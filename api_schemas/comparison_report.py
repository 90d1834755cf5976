"""Report what the outcomes of a comparison's children show: gaps with intervals, bytes, speed, a verdict for each arm.

Everything here is a pure function of the outcomes, taken in the order of seeds: the first seeds decide, whichever child ended
first. So the report is the same after whatever was killed. The control plane, which decides by it which children come next,
and the client, which compares any jobs, use the same functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.comparison import NOISE, Arm, Child, Comparison, ComparisonSpec, EvaluatedPoint, Outcome
from octet.api_schemas.evaluation import HALF_WIDTH
from octet.api_schemas.job import JobSummary
from octet.api_schemas.paired import Answer, Interval, Look, gaps, look, moved_by_chance, num_needed, why_not_calm

Outcomes = Mapping[tuple[int, int], Outcome]
"""Outcomes by the number of the arm and the seed."""


class Gap(Contract):
    """An arm beside the baseline in one measure at one step: means over the seeds that both have, and their gap.

    The interval is of 95 % at this step alone; an arm's answer has an interval of its own, for all looks together.
    """

    measure: str = Field(
        description="training_loss (mean of the last tenth of the steps), loss (of an evaluation), or a metric"
    )
    step: int
    is_relative: bool = Field(description="the gap is a share of the baseline's value; else a difference")
    num_seeds: int
    mean: float
    mean_half_width: float | None = Field(description="of the arm's mean over its seeds; null with one seed")
    baseline_mean: float
    gap: float
    half_width: float | None = Field(description="null with one seed")


class ArmReport(Contract):
    """An arm's verdict and figures."""

    name: str
    is_baseline: bool
    answer: Answer | Literal["baseline", "failed"] = Field(description="does it lose at most the tolerance?")
    words: str
    seeds: tuple[int, ...] = Field(description="those that the answer rests on")
    by_seed: tuple[float, ...] = Field(description="relative gap of the evaluation loss for each of them")
    gap: float | None = Field(description="their mean; positive is worse")
    half_width: float | None = Field(description="of its interval, 95 % for all looks together; null before there are two")
    is_distinct: bool = Field(description="the interval leaves zero out")
    more_seeds: int | None = Field(description="estimate of the seeds until the answer is certain; null if it is, or unknown")
    gaps: tuple[Gap, ...]
    num_parameters: int | None
    memory_bytes: dict[str, int] = Field(description="by class, as octet.memory_report counts them; means over seeds")
    bytes_per_parameter: float | None
    memory_saving: float | None = Field(description="share of the baseline's bytes that this arm does without")
    peak_memory_bytes: int | None
    tokens_per_s: float | None
    train_time_s: float | None


class ComparisonReport(Contract):
    """The arms of a comparison, and what it says in all."""

    baseline: str
    tolerance: float
    noise: float | None = Field(description="mean size of the gap that a start changed by a thousandth makes")
    not_calm: str | None = Field(description="why gaps of this size cannot be shown in this setting")
    left_out: tuple[str, ...] = Field(description="children that are not compared, with the reason")
    arms: tuple[ArmReport, ...]


class ComparisonDetails(Comparison):
    """A comparison with its children and what they show so far."""

    children: tuple[Child, ...]
    report: ComparisonReport


@dataclass(frozen=True)
class Question:
    """The question to outcomes. seeds: in their order. is_sequential: asked after each seed until the answer is certain, and
    first after `least_seeds`.
    """

    arms: Sequence[Arm]
    baseline: int
    seeds: Sequence[int]
    tolerance: float
    is_sequential: bool = True
    least_seeds: int = 2

    @classmethod
    def of(cls, spec: ComparisonSpec) -> "Question":
        """Return the question of a comparison."""
        return cls(spec.arms, spec.baseline_index, spec.child_seeds, spec.tolerance, least_seeds=spec.least_seeds)


@dataclass(frozen=True)
class Standing:
    """An arm as far as outcomes are known without a hole. failure: a seed that could not be compared, and the reason.

    waits: an outcome is missing that may change the answer. blocked: the next seed, with which the baseline has failed.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    look: Look | None
    failure: tuple[int, Outcome] | None
    left_out: tuple[str, ...]
    waits: bool
    blocked: tuple[int, Outcome] | None

    @property
    def is_decided(self) -> bool:
        """True once no further seed can change the answer."""
        return self.failure is not None or (self.look is not None and self.look.answer != "open")


def stand(question: Question, arm: int, outcomes: Outcomes) -> Standing:
    """Go through the seeds in their order, up to the first missing outcome or the first certain answer."""
    seeds: list[int] = []
    values: list[float] = []
    left_out: list[str] = []
    found: Look | None = None
    failure: tuple[int, Outcome] | None = None
    blocked: tuple[int, Outcome] | None = None
    waits = False
    for seed in question.seeds:
        own, reference = outcomes.get((arm, seed)), outcomes.get((question.baseline, seed))
        if reference is not None and reference.has_failed:
            blocked = seed, reference
            break
        if own is None or reference is None:
            waits = True
            break
        if own.has_failed:
            failure = seed, own
            break
        if own.summary is None or reference.summary is None:
            name, why = (question.arms[arm].name, own.why) if own.summary is None else (_baseline(question), reference.why)
            left_out.append(f"seed {seed} of {question.arms[arm].name}: {why} ({name})")
            continue
        seeds.append(seed)
        values += gaps([own.summary.evaluation_loss], [reference.summary.evaluation_loss])
        if question.is_sequential:
            found = look(values, question.tolerance, len(question.seeds), question.least_seeds)
            if found is not None and found.answer != "open":
                break
    if not question.is_sequential and len(values) > 1:
        interval = Interval.of(values)
        found = Look(len(values), interval, interval.is_at_most(question.tolerance))
    return Standing(tuple(seeds), tuple(values), found, failure, tuple(left_out), waits, blocked)


def _baseline(question: Question) -> str:
    return question.arms[question.baseline].name


def noise_of(question: Question, outcomes: Outcomes) -> tuple[float | None, str | None]:
    """Return how far chance moves the baseline's loss, and why that is too much: (None, None) before it is known."""
    pairs: list[tuple[JobSummary, JobSummary]] = []
    for (arm, seed), changed in sorted(outcomes.items()):
        reference = outcomes.get((question.baseline, seed))
        if arm != NOISE or reference is None:
            continue
        if changed.has_failed:
            return None, f"the baseline from a start changed by a thousandth, with seed {seed}, {changed.kind}: {changed.why}"
        if changed.summary is not None and reference.summary is not None:
            pairs.append((changed.summary, reference.summary))
    if not pairs:
        return None, None
    losses, references = ([summary.evaluation_loss for summary in side] for side in zip(*pairs, strict=True))
    moved = moved_by_chance(losses, references)
    return moved, why_not_calm(moved, question.tolerance)


def report_of(question: Question, outcomes: Outcomes) -> ComparisonReport:
    """Say what outcomes show. Those that are missing are not waited for."""
    moved, not_calm = noise_of(question, outcomes)
    standings = {arm: stand(question, arm, outcomes) for arm in range(len(question.arms)) if arm != question.baseline}
    used = [seed for seed in question.seeds if any(seed in standing.seeds for standing in standings.values())]
    return ComparisonReport(
        baseline=_baseline(question),
        tolerance=question.tolerance,
        noise=moved,
        not_calm=not_calm,
        left_out=tuple(line for standing in standings.values() for line in standing.left_out),
        arms=tuple(_arm_report(question, arm, standings.get(arm), outcomes, used) for arm in range(len(question.arms))),
    )


def _arm_report(question: Question, arm: int, standing: Standing | None, outcomes: Outcomes, used: Sequence[int]) -> ArmReport:
    """Report an arm. standing: None for the baseline. used: the seeds with which the baseline is shown."""
    seeds = used if standing is None else standing.seeds
    own = [outcomes[arm, seed] for seed in seeds]
    references = [outcomes[question.baseline, seed] for seed in seeds]
    summaries = [outcome.summary for outcome in own if outcome.summary is not None]
    baselines = [outcome.summary for outcome in references if outcome.summary is not None]
    held, baseline_held = _held(summaries), _held(baselines)
    interval = None if standing is None or standing.look is None else standing.look.interval
    values = standing.values if standing is not None else ()
    answer, words, more_seeds = _answer(question, arm, standing)
    saving = None if not held or not baseline_held or standing is None else 1 - held / baseline_held
    return ArmReport(
        name=question.arms[arm].name,
        is_baseline=standing is None,
        answer=answer,
        words=words if saving is None else f"{words}; {_saving_words(saving)}",
        seeds=tuple(seeds),
        by_seed=values,
        gap=fmean(values) if values else None,
        half_width=None if interval is None else interval.half_width,
        is_distinct=interval is not None and not interval.is_zero,
        more_seeds=more_seeds,
        gaps=tuple(_gaps(own, references)),
        num_parameters=summaries[0].num_parameters if summaries else None,
        memory_bytes={
            kind: round(fmean(each.memory_bytes.get(kind, 0) for each in summaries))
            for kind in (summaries[0].memory_bytes if summaries else ())
        },
        bytes_per_parameter=held / summaries[0].num_parameters if held and summaries[0].num_parameters else None,
        memory_saving=saving,
        peak_memory_bytes=_peak(summaries),
        tokens_per_s=_mean(summaries, lambda each: each.tokens_per_s),
        train_time_s=_mean(summaries, lambda each: each.train_time_s),
    )


def _mean(summaries: Sequence[JobSummary], value: Callable[[JobSummary], float]) -> float | None:
    return fmean(map(value, summaries)) if summaries else None


def _held(summaries: Sequence[JobSummary]) -> float | None:
    return _mean(summaries, lambda each: sum(each.memory_bytes.values()))


def _peak(summaries: Sequence[JobSummary]) -> int | None:
    return max((each.peak_memory_bytes for each in summaries if each.peak_memory_bytes is not None), default=None)


def _answer(
    question: Question, arm: int, standing: Standing | None
) -> tuple[Answer | Literal["baseline", "failed"], str, int | None]:
    """Return an arm's answer, the sentence that gives it, and the estimate of the seeds that it still needs."""
    name = question.arms[arm].name
    if standing is None:
        return "baseline", f"{name} is the baseline", None
    asked = f"{name} loses at most {question.tolerance:.2%} of {_baseline(question)}'s loss"
    if standing.failure is not None:
        seed, outcome = standing.failure
        if outcome.kind == "diverged":
            return "no", f"{asked}: no, it diverged with seed {seed}", None
        return "failed", f"{asked}: not known, its job with seed {seed} failed ({outcome.why})", None
    if standing.look is None:
        least = question.least_seeds if question.is_sequential else 2
        return "open", f"{asked}: cannot tell yet, it takes {least} seeds at least", least - len(standing.values)
    found, interval = standing.look, standing.look.interval
    low, high = interval.mean - interval.half_width, interval.mean + interval.half_width
    between = f"between {low:+.2%} and {high:+.2%}"
    if found.answer == "open":
        return "open", *_open_words(question, standing, asked, between)
    better = ", and is better" if high < 0 else ""
    return found.answer, f"{asked}: {found.answer}, with 95 %{better} (gap {between})", None


def _open_words(question: Question, standing: Standing, asked: str, between: str) -> tuple[str, int | None]:
    num_planned, num_values = len(question.seeds), len(standing.values)
    planned = num_planned if question.is_sequential else None
    needed = num_needed(standing.values, question.tolerance, planned, question.least_seeds)
    if needed is None:
        return f"{asked}: cannot tell; the gap is as large as the tolerance, or varies too much ({between})", None
    more = needed - num_values
    would = f"{more} more {'seed' if more == 1 else 'seeds'} would"
    beyond = f", beyond the {num_planned} asked for" if question.is_sequential and needed > num_planned else ""
    return f"{asked}: cannot tell yet; {would}{beyond} (gap {between})", more


def _saving_words(saving: float) -> str:
    if round(saving, 2) == 0:
        return "holds as much memory"
    return f"saves {saving:.0%} of memory" if saving > 0 else f"takes {-saving:.0%} more memory"


def _gaps(own: Sequence[Outcome], references: Sequence[Outcome]) -> list[Gap]:
    """Compare outcomes of the same seeds: the final training loss, and each evaluation that all of them have."""
    pairs = [(one.summary, other.summary) for one, other in zip(own, references, strict=True) if one.summary and other.summary]
    if not pairs:
        return []
    losses = [(one.final_loss, other.final_loss) for one, other in pairs]
    found = [_gap("training_loss", max(one.steps for one, _ in pairs), losses)]
    points = [{point.step: point for point in outcome.points} for outcome in (*own, *references)]
    for step in sorted(set.intersection(*map(set, points))):
        at_step = [each[step] for each in points]
        for measure in ("loss", *(name for name in at_step[0].metrics if not name.endswith(HALF_WIDTH))):
            values = [_value(point, measure) for point in at_step]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                found.append(_gap(measure, step, list(zip(known[: len(own)], known[len(own) :], strict=True))))
    return found


def _value(point: EvaluatedPoint, measure: str) -> float | None:
    return point.loss if measure == "loss" else point.metrics.get(measure)


def _gap(measure: str, step: int, pairs: Sequence[tuple[float, float]]) -> Gap:
    """Compare values in pairs: losses by their share, unless one is zero, and others by their difference."""
    own, references = zip(*pairs, strict=True)
    is_relative = measure.endswith("loss") and all(references)
    differences = gaps(own, references) if is_relative else [one - other for one, other in pairs]
    has_interval = len(pairs) > 1
    return Gap(
        measure=measure,
        step=step,
        is_relative=is_relative,
        num_seeds=len(pairs),
        mean=fmean(own),
        mean_half_width=Interval.of(own).half_width if has_interval else None,
        baseline_mean=fmean(references),
        gap=fmean(differences),
        half_width=Interval.of(differences).half_width if has_interval else None,
    )
