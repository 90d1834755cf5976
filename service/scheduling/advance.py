"""Decide how a comparison goes on. Pure: the same outcomes give the same decision, whoever asks and how often.

First the baseline trains from its start and from one that is changed by a thousandth, with two seeds. If that alone moves the
loss too far, nothing else is trained. Then come the arms, seed by seed, until each has a certain answer.
"""

from dataclasses import dataclass

from octet.api_schemas.comparison import NOISE, NUM_NOISE_SEEDS, ComparisonSpec, ComparisonState, Outcome
from octet.api_schemas.comparison_report import Outcomes, Question, noise_of, stand


@dataclass(frozen=True)
class Advance:
    """The children that a comparison still takes, in their order, by arm and seed; or the end and the reason for it."""

    wanted: tuple[tuple[int, int], ...] = ()
    ends: tuple[ComparisonState, str] | None = None


def advance(spec: ComparisonSpec, outcomes: Outcomes, used_slot_hours: float = 0.0) -> Advance:
    """Decide how a comparison goes on after these outcomes. What is wanted may be under way already.

    used_slot_hours: what its jobs have taken. Outcomes count before the budget: an answer that is there is given.
    """
    decided = _advance(spec, outcomes)
    budget = spec.budget_slot_hours
    if decided.ends is not None or budget is None or used_slot_hours < budget:
        return decided
    question = Question.of(spec)
    others = [arm for arm in range(len(question.arms)) if arm != question.baseline]
    num_open = sum(not stand(question, arm, outcomes).is_decided for arm in others)
    message = f"its budget of {budget:g} slot hours is used; {num_open} of {len(others)} arms have no certain answer"
    return Advance(ends=(ComparisonState.FINISHED, message))


def _advance(spec: ComparisonSpec, outcomes: Outcomes) -> Advance:
    question = Question.of(spec)
    noise = [(arm, seed) for seed in spec.child_seeds[:NUM_NOISE_SEEDS] for arm in (question.baseline, NOISE)]
    waits_for_noise = [child for child in noise if child not in outcomes]
    for arm, seed in noise:
        outcome = outcomes.get((arm, seed))
        if outcome is not None and (outcome.kind == "failed" or (arm != NOISE and outcome.has_failed)):
            return _without_baseline(question, seed, outcome, " from a changed start" if arm == NOISE else "")
    moved, not_calm = noise_of(question, outcomes)
    if not_calm is not None and (moved is None or not waits_for_noise):
        return Advance(ends=(ComparisonState.TOO_WILD, not_calm))
    if waits_for_noise:
        return Advance(tuple(waits_for_noise))
    if moved is None:
        why = next(outcomes[child].why for child in noise if outcomes[child].summary is None)
        message = (
            f"how far chance moves the baseline's loss is not known: of each pair of its jobs one is left out, since {why}"
        )
        return Advance(ends=(ComparisonState.FAILED, message))
    return _go_on(question, outcomes)


def _go_on(question: Question, outcomes: Outcomes) -> Advance:
    """Decide after the noise is known. Arms go on as long as they can without the seeds with which the baseline has failed."""
    others = [arm for arm in range(len(question.arms)) if arm != question.baseline]
    standings = {arm: stand(question, arm, outcomes) for arm in others}
    waiting = [arm for arm in others if standings[arm].waits]
    if waiting:
        arms = [question.baseline, *waiting]
        return Advance(tuple((arm, seed) for seed in question.seeds for arm in arms if (arm, seed) not in outcomes))
    if blocked := next((standing.blocked for standing in standings.values() if standing.blocked is not None), None):
        return _without_baseline(question, *blocked)
    num_open = sum(not standing.is_decided for standing in standings.values())
    message = f"{num_open} of {len(others)} arms have no certain answer after all seeds" if num_open else "all are certain"
    return Advance(ends=(ComparisonState.FINISHED, message))


def _without_baseline(question: Question, seed: int, outcome: Outcome, start: str = "") -> Advance:
    """End a comparison whose baseline has failed: nothing can be compared with it."""
    message = f"the baseline {question.arms[question.baseline].name}{start} {outcome.kind} with seed {seed}: {outcome.why}"
    return Advance(ends=(ComparisonState.FAILED, message))
