"""Comparisons simulated by the hundred: a twin is hardly ever called different, a bad recipe nearly always is found."""

import random
from collections import Counter
from typing import Any

import pytest

from octet.api_schemas import JobState
from octet.api_schemas.comparison import NOISE, ComparisonSpec, ComparisonState, EvaluatedPoint, Outcome, outcome_of
from octet.api_schemas.comparison_report import Question, report_of, stand
from octet.service.scheduling.advance import advance
from tests.kit.summaries import summary_of

Document = dict[str, Any]
NUM_COMPARISONS = 400
BASELINE, TWIN, BAD = range(3)
SHIFT = {NOISE: 0.0, BASELINE: 0.0, TWIN: 0.0, BAD: 0.01}
_SUMMARY = summary_of(1.0)


@pytest.fixture
def spec(spec_document: Document) -> ComparisonSpec:
    job = spec_document | {"training": spec_document["training"] | {"seed": 0}}
    return ComparisonSpec.model_validate({"job": job, "levels": ["fp32", "O1", "O2"], "seeds": 5, "tolerance": 0.0025})


def trained(arm: int, seed: int, chance: random.Random, deviation: float) -> Outcome:
    """Return the outcome of a curve that falls to a loss with some chance in it."""
    loss = (2 + seed / 10) * (1 + SHIFT[arm] + chance.gauss(0, deviation))
    summary = _SUMMARY.model_copy(update={"final_loss": loss, "evaluation_loss": loss})
    points = [EvaluatedPoint(step=step, loss=loss + 1 / step, metrics={}) for step in (5, 10)]
    return outcome_of(JobState.SUCCEEDED, summary, None, None, points)


def run(spec: ComparisonSpec, number: int, deviation: float) -> tuple[ComparisonState, dict[tuple[int, int], Outcome]]:
    """Let the wanted children end one by one, in an order of chance among the first few."""
    chance, outcomes = random.Random(number), dict[tuple[int, int], Outcome]()
    while (decided := advance(spec, outcomes)).ends is None:
        assert decided.wanted, "it neither ends nor goes on"
        arm, seed = chance.choice(decided.wanted[: spec.at_once])
        outcomes[arm, seed] = trained(arm, seed, chance, deviation)
    return decided.ends[0], outcomes


def test_hundreds_of_comparisons_are_right_in_95_of_100(spec: ComparisonSpec) -> None:
    question, found = Question.of(spec), Counter[str]()
    for number in range(NUM_COMPARISONS):
        state, outcomes = run(spec, number, deviation=0.0004)
        if state is ComparisonState.TOO_WILD:
            found["too wild"] += 1
            continue
        assert state is ComparisonState.FINISHED
        report = report_of(question, outcomes)
        twin, bad = report.arms[TWIN], report.arms[BAD]
        found["twin is called different"] += twin.answer == "no" or twin.is_distinct
        found["twin is called safe"] += twin.answer == "yes"
        found["bad is found"] += bad.answer == "no"
        found["children"] += len(outcomes)
    assert found["too wild"] <= 0.1 * NUM_COMPARISONS
    num_compared = NUM_COMPARISONS - found["too wild"]
    assert found["twin is called different"] <= 0.05 * num_compared
    assert found["twin is called safe"] >= 0.9 * num_compared
    assert found["bad is found"] >= 0.95 * num_compared
    assert found["children"] < 0.95 * num_compared * (2 + 3 * spec.seeds), "it stops once the answers are certain"


def test_wild_settings_are_refused_after_the_noise_alone(spec: ComparisonSpec) -> None:
    ends = [run(spec, number, deviation=0.01) for number in range(100)]
    wild = [outcomes for state, outcomes in ends if state is ComparisonState.TOO_WILD]
    assert len(wild) >= 90
    assert all({arm for arm, _ in outcomes} == {BASELINE, NOISE} for outcomes in wild)


def test_a_failed_baseline_ends_it_unless_every_arm_is_decided(spec: ComparisonSpec) -> None:
    failed = outcome_of(JobState.FAILED, None, None, "gone", ())
    state, outcomes = run(spec, 0, deviation=1e-6)
    assert state is ComparisonState.FINISHED
    unused = spec.child_seeds[-1]
    standings = [stand(Question.of(spec), arm, outcomes) for arm in (TWIN, BAD)]
    assert all(standing.is_decided for standing in standings)
    assert (BASELINE, unused) not in outcomes, "the seeds were all needed"
    ends = advance(spec, outcomes | {(BASELINE, unused): failed}).ends
    assert ends is not None
    assert ends[0] is ComparisonState.FINISHED
    for arm, words in ((BASELINE, "the baseline fp32 failed"), (NOISE, "the baseline fp32 from a changed start failed")):
        ends = advance(spec, {(arm, 0): failed}).ends
        assert ends is not None
        assert ends[0] is ComparisonState.FAILED
        assert ends[1].startswith(words)


def test_noise_that_nobody_measured_is_no_calm(spec: ComparisonSpec) -> None:
    gone = outcome_of(None, None, None, None, ())
    outcomes = {
        (arm, seed): gone if arm == NOISE else outcome_of(JobState.SUCCEEDED, _SUMMARY, None, None, ())
        for arm in (BASELINE, NOISE)
        for seed in (0, 1)
    }
    ends = advance(spec, outcomes).ends
    assert ends is not None
    assert ends[0] is ComparisonState.FAILED


def test_a_baseline_without_a_loss_ends_it_with_the_reason(spec: ComparisonSpec) -> None:
    outcomes = {
        (arm, seed): outcome_of(JobState.SUCCEEDED, summary_of(0.0), None, None, ())
        for arm in (BASELINE, NOISE)
        for seed in (0, 1)
    }
    decided = advance(spec, outcomes)
    assert decided.ends is not None
    assert decided.ends[0] is ComparisonState.FAILED
    assert decided.ends[1].endswith("since its job reported no evaluation loss, or one of zero")


def test_a_budget_ends_a_comparison_with_what_is_known(spec: ComparisonSpec) -> None:
    limited = spec.model_copy(update={"budget_slot_hours": 2.0})
    outcomes: dict[tuple[int, int], Outcome] = {}
    assert advance(limited, outcomes, 1.9) == advance(spec, outcomes)
    ended = (ComparisonState.FINISHED, "its budget of 2 slot hours is used; 2 of 2 arms have no certain answer")
    assert advance(limited, outcomes, 2.0).ends == ended
    _, outcomes = run(spec, 0, deviation=0.0004)
    assert advance(limited, outcomes, 100.0) == advance(spec, outcomes)
    assert advance(spec, outcomes).ends is not None


def test_arms_climb_no_ladder(spec_document: Document) -> None:
    """An arm that went on at another level would be compared under the name of its own."""
    job = spec_document | {"precision": {"level": "O1", "ladder": ["te"]}}
    asked = ComparisonSpec.model_validate({"job": job, "vary": {"training.optimizer.learning_rate": [1e-3, 1e-4]}})
    assert [asked.child(arm, 0, "cmp").precision.ladder for arm in (0, 1, NOISE)] == [(), (), ()]
