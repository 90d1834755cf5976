"""Comparisons: which arms and children a spec has, what is refused, and what outcomes show."""

from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import FailureReason, JobState, explain
from octet.api_schemas.comparison import NOISE, ComparisonSpec, EvaluatedPoint, Outcome, outcome_of
from octet.api_schemas.comparison_report import ComparisonReport, Question, report_of, stand
from tests.kit.summaries import summary_of

Document = dict[str, Any]
LOSSES = {0: (2.0, 2.001), 1: (2.1, 2.104), 2: (1.9, 1.9015)}
"""The baseline's and another arm's evaluation loss by seed: gaps of 0.05 %, 0.19 % and 0.08 %."""


MEASURED: dict[str, float | None] = {"empty": None, "capitals_acc": 0.25, "capitals_acc_half_width": 0.1}


def comparison(job: Document, **fields: Any) -> ComparisonSpec:
    job = job | {"training": job["training"] | {"seed": 0}}
    return ComparisonSpec.model_validate({"job": job, **fields})


def outcome(loss: float, weights: int = 400) -> Outcome:
    summary = summary_of(loss, memory_bytes={"weights": weights, "gradients": 400})
    points = [
        EvaluatedPoint(step=step, loss=loss + 10 - step, metrics=MEASURED | {"accuracy": 0.5 + step / 100}) for step in (5, 10)
    ]
    return outcome_of(JobState.SUCCEEDED, summary, None, None, points)


FAILED = outcome_of(JobState.FAILED, None, FailureReason.WORKER_LOST, "gone", ())
DIVERGED = outcome_of(JobState.FAILED, None, FailureReason.DIVERGED, "up", ())
DELETED = outcome_of(None, None, None, None, ())


@pytest.fixture
def spec(spec_document: Document) -> ComparisonSpec:
    return comparison(spec_document, levels=["fp32", "O2"], tolerance=0.01, seeds=3)


def report(spec: ComparisonSpec, *others: tuple[int, int, Outcome]) -> ComparisonReport:
    """Report LOSSES, with some outcomes in their places."""
    found = {(arm, seed): outcome(losses[arm], 400 - 200 * arm) for seed, losses in LOSSES.items() for arm in (0, 1)}
    return report_of(Question.of(spec), found | {(arm, seed): each for arm, seed, each in others})


def test_levels_and_fields_are_combined_each_with_each(spec_document: Document) -> None:
    rates = {"training.optimizer.learning_rate": [1e-4, 0.003]}
    spec = comparison(spec_document, levels=["fp32", "O2"], vary=rates, baseline="O2, learning_rate=0.0001")
    assert [arm.name for arm in spec.arms] == [
        "fp32, learning_rate=0.0001",
        "fp32, learning_rate=0.003",
        "O2, learning_rate=0.0001",
        "O2, learning_rate=0.003",
    ]
    child = spec.child(3, 4, "cmp_1")
    assert (child.precision.level, child.training.optimizer.learning_rate, child.training.seed) == ("O2", 0.003, 4)
    assert child.labels == {"comparison": "cmp_1", "arm": "O2, learning_rate=0.003", "seed": "4"}
    assert child.name == "small-O2-learning_rate-0.003-s4"
    noise = spec.child(NOISE, 4, "cmp_1")
    assert (noise.precision.level, noise.training.start_change) == ("O2", 1e-3)
    assert noise.training.optimizer.learning_rate == 1e-4


def test_defaults_follow_from_what_an_arm_changes(spec_document: Document) -> None:
    job = spec_document | {"precision": {"level": "te", "recipe": {"scaling": "current"}}}
    spec = comparison(job, vary={"precision.recipe.granularity": ["tensor", "block"]})
    formats = [spec.child(arm, 0, "").precision.recipe for arm in (0, 1)]
    assert [recipe and recipe.format for recipe in formats] == ["HYBRID", "E4M3"]
    stored = ComparisonSpec.read_stored(spec.model_dump(mode="json", exclude_unset=True))
    assert stored.child(1, 0, "") == spec.child(1, 0, "")


def test_null_is_the_default_of_a_field(spec_document: Document) -> None:
    spec = comparison(spec_document, vary={"training.gradient_clip": [0.5, None]})
    assert [arm.name for arm in spec.arms] == ["gradient_clip=0.5", "gradient_clip=null"]
    assert [spec.child(arm, 0, "").training.gradient_clip for arm in (0, 1)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "vary", "2 to 32"),
        ({"levels": ["O2"]}, "vary", "2 to 32"),
        ({"vary": {"training.seed": [0, 1]}}, "vary", "names or pairs the children"),
        ({"vary": {"labels.team": ["a", "b"]}}, "vary", "names or pairs the children"),
        ({"vary": {"training.preset": ["swin", None]}}, "vary", "gives way"),
        ({"vary": {"training.steps": [5, 5]}}, "vary", "each arm once"),
        ({"vary": {"training.step": [5, 6]}}, "job.training.step", "Did you mean 'steps'?"),
        ({"vary": {"training.steps": [5, -6]}}, "job.training.steps", "Arm steps=-6 is no valid job"),
        ({"levels": ["fp32", "O2"], "baseline": "O3"}, "baseline", "fp32, O2"),
        ({"levels": ["fp32", "O2"], "vary": {"precision.level": ["te", "O1"]}}, "vary", "levels has them"),
        ({"vary": {"model.hidden_size": list(range(2, 80, 2))}}, "vary", "2 to 32"),
        ({"levels": ["fp32", "O2"], "seeds": 4, "least_seeds": 5}, "least_seeds", "2 to 4, which is seeds"),
    ],
)
def test_what_is_refused_names_the_field(spec_document: Document, fields: Document, field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        comparison(spec_document, **fields)
    (violation,) = explain(refused.value, ComparisonSpec)
    assert violation.field == field
    assert words in f"{violation.allowed} {violation.message}"


def test_labels_of_children_are_not_the_users(spec_document: Document) -> None:
    with pytest.raises(ValidationError, match="labels of other keys"):
        comparison(spec_document | {"labels": {"arm": "x"}}, levels=["fp32", "O2"])


def test_an_answer_comes_with_its_interval_and_what_is_saved(spec: ComparisonSpec) -> None:
    found = report(spec, (NOISE, 0, outcome(2.002)), (NOISE, 1, outcome(2.1)))
    baseline, arm = found.arms
    assert (baseline.answer, baseline.seeds) == ("baseline", (0, 1, 2))
    assert arm.answer == "yes"
    assert arm.words.startswith("O2 loses at most 1.00% of fp32's loss: yes, with 95 % (gap between ")
    assert arm.words.endswith("; saves 25% of memory")
    assert arm.by_seed == pytest.approx((0.0005, 0.004 / 2.1, 0.0015 / 1.9))
    assert arm.bytes_per_parameter == 6.0
    assert found.noise == pytest.approx(0.0005)
    assert found.not_calm is None


def test_gaps_are_listed_at_every_common_evaluation(spec: ComparisonSpec) -> None:
    gaps = {(each.measure, each.step): each for each in report(spec).arms[1].gaps}
    measures = ("loss", "accuracy", "capitals_acc")
    assert set(gaps) == {("training_loss", 10), *((measure, step) for measure in measures for step in (5, 10))}
    last = gaps["loss", 10]
    assert last.is_relative
    assert last.gap == pytest.approx((0.0005 + 0.004 / 2.1 + 0.0015 / 1.9) / 3)
    assert (last.num_seeds, last.baseline_mean) == (3, pytest.approx(2.0))
    accuracy = gaps["accuracy", 5]
    assert (accuracy.is_relative, accuracy.gap, accuracy.half_width) == (False, 0.0, 0.0)


def test_what_is_wide_stays_open_and_says_how_many_more(spec: ComparisonSpec) -> None:
    arm = report(spec, (1, 2, outcome(1.93))).arms[1]
    assert arm.answer == "open"
    assert arm.more_seeds is not None
    assert f"cannot tell yet; {arm.more_seeds} more seeds would, beyond the 3 asked for" in arm.words


def test_an_arm_that_diverges_is_answered_and_one_that_fails_is_not(spec: ComparisonSpec) -> None:
    assert report(spec, (1, 0, DIVERGED)).arms[1].words.endswith("no, it diverged with seed 0")
    failed = report(spec, (1, 0, FAILED)).arms[1]
    assert (failed.answer, failed.gaps) == ("failed", ())
    assert "seed 0 failed (worker_lost: gone)" in failed.words


def test_a_deleted_child_is_left_out_and_named(spec: ComparisonSpec) -> None:
    found = report(spec, (0, 1, DELETED))
    assert found.left_out == ("seed 1 of O2: its job was deleted (fp32)",)
    assert found.arms[1].seeds == (0, 2)


def test_a_missing_seed_holds_up_those_behind_it(spec: ComparisonSpec) -> None:
    """Whichever child ends first, the first seeds decide: so the report does not depend on who was killed."""
    found = {(arm, seed): outcome(2.0 + arm / 1000 * seed) for arm in (0, 1) for seed in (0, 2)}
    standing = stand(Question.of(spec), 1, found)
    assert (standing.seeds, standing.waits) == ((0,), True)


def test_long_curves_are_thinned_to_their_last_point() -> None:
    points = [EvaluatedPoint(step=step, loss=1.0, metrics={}) for step in range(1, 1002)]
    kept = outcome(1.0).summary
    thinned = outcome_of(JobState.SUCCEEDED, kept, None, None, points).points
    assert len(thinned) <= 200
    assert thinned[-1].step == 1001
