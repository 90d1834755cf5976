"""The step of a pipeline's rank from the passes of a shorter pipeline, with fewer micro-batches.

Passes of the same stage, forward or backward, change a rank's memory alike; only the micro-batches in flight differ. So each is
traced once before and once after gradients exist, and the step is put together in the order of the job's own schedule.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octet.api_schemas import JobSpec, Layout
from octet.worker.planning.curve import Moment


class Pass(NamedTuple):
    """A pass of a micro-batch. run: the index of the stage among the rank's own."""

    is_forward: bool
    run: int


class Kind(NamedTuple):
    """Passes with the same moments: of a stage, whether it had one before, and what the rank did before."""

    step: Pass
    is_first: bool
    follows_forward: bool


def shortened(spec: JobSpec, pipeline_rank: int) -> tuple[JobSpec, int, int]:
    """Return a job with a pipeline of two or three, a rank of it with the same stages, and its micro-batches.

    So many have every pass before and after gradients exist, but for the last stages of an interleaved pipeline, where a pass
    after another stands for one after its opposite. A job with fewer stays as it is.
    """
    layout, num_passes = spec.layout, spec.batch.num_micro_batches
    is_between = 0 < pipeline_rank < layout.pipeline - 1
    length = 3 if is_between else 2
    num_traced = 3 if layout.stages_per_rank == 1 else length
    if layout.pipeline == 1 or num_passes <= num_traced:
        return spec, pipeline_rank, num_passes
    parallelism = spec.parallelism.model_copy(update={"pipeline": length})
    workers = spec.resources.workers // layout.pipeline * length
    resources = spec.resources.model_copy(update={"workers": workers})
    short = spec.model_copy(update={"parallelism": parallelism, "resources": resources})
    return short, 1 if is_between else min(pipeline_rank, 1), num_traced


def order(layout: Layout, pipeline_rank: int, num_micro_batches: int) -> Iterator[Pass]:
    """Yield a rank's passes as torch's `Schedule1F1B` and `ScheduleInterleaved1F1B` run them."""
    runs, behind = layout.stages_per_rank, layout.pipeline - 1 - pipeline_rank
    num_passes = runs * num_micro_batches
    if runs == 1:
        in_turn, num_ahead = num_micro_batches, behind + 1
    else:
        in_turn = num_micro_batches // max(1, num_micro_batches // layout.pipeline)
        num_ahead = (runs - 1) * in_turn + 2 * behind
    num_ahead = min(num_ahead, num_passes)
    backward = iter(Pass(False, runs - 1 - index // in_turn % runs) for index in range(num_passes))
    for index in range(num_passes):
        if runs == 1 and index >= num_ahead:
            yield next(backward)
        yield Pass(True, index // in_turn % runs)
        if runs > 1 and index >= num_ahead:
            yield next(backward)
    yield from backward


def composed(phases: Sequence[Sequence[Moment]], traced: Sequence[Pass], wanted: Sequence[Pass]) -> list[list[Moment]]:
    """Return the phases of the passes that are wanted, without those that repeat others.

    phases: what is done before all passes, those of `traced`, and the update. Raises ValueError if they are others.
    """
    if len(phases) != len(traced) + 2:
        raise ValueError(f"{len(phases) - 2} passes were traced; the schedule has {len(traced)}")
    start, found = phases[0][-1], dict[Kind, tuple[Moment, Sequence[Moment]]]()
    for kind, phase in zip(_kinds(traced), phases[1:-1], strict=True):
        found.setdefault(kind, (start, phase))
        start = phase[-1] if phase else start
    result, now, seen = [list(phases[0])], phases[0][-1], set[tuple[Any, ...]]()
    in_flight = Counter[int]()
    for kind in _kinds(wanted):
        start, phase = found.get(kind) or found[kind._replace(follows_forward=not kind.follows_forward)]
        state = (kind, *in_flight.items())
        if state not in seen:
            seen.add(state)
            result.append([_shifted(moment, start, now) for moment in phase])
        in_flight[kind.step.run] += 1 if kind.step.is_forward else -1
        now = _shifted(phase[-1], start, now) if phase else now
    return [*result, list(phases[-1])]


def _kinds(passes: Sequence[Pass]) -> Iterator[Kind]:
    had, follows_forward = set[Pass](), False
    for step in passes:
        yield Kind(step, step not in had, follows_forward)
        had.add(step)
        follows_forward = step.is_forward


def _shifted(moment: Moment, start: Moment, now: Moment) -> Moment:
    """Return a moment of a pass that began at `start`, of the same pass that begins at `now`."""
    by_class = tuple(own + new - old for own, old, new in zip(moment.by_class, start.by_class, now.by_class, strict=True))
    return Moment(moment.op, moment.num_bytes + now.num_bytes - start.num_bytes, by_class)
