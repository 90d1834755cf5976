"""Statistics of paired runs: Student's intervals, and looks after each seed that together are wrong in at most 5 of 100."""

import random
from collections import Counter
from statistics import stdev

import pytest

from octet.api_schemas.paired import (
    ERROR,
    Interval,
    deviation_of,
    error_of_look,
    gaps,
    look,
    num_needed,
    t_quantile,
    why_not_calm,
)

TOLERANCE, NUM_SEEDS = 0.0025, 5

PUBLISHED_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 19: 2.093, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("num_degrees", "t"), PUBLISHED_T.items())
def test_quantiles_are_the_published_ones(num_degrees: int, t: float) -> None:
    assert t_quantile(num_degrees) == pytest.approx(t, abs=6e-4)


def test_quantiles_of_small_errors() -> None:
    """Two degrees have a closed form, t² = 2 (1-e)² / (1 - (1-e)²); at 1 % and 4 degrees tables say 4.604."""
    for error in (0.01, 1e-3, 1e-6):
        share = 1 - error
        assert t_quantile(2, error) == pytest.approx((2 * share**2 / (1 - share**2)) ** 0.5, rel=1e-6)
    assert t_quantile(4, 0.01) == pytest.approx(4.604, abs=6e-4)


class TestInterval:
    def test_of_five_values(self) -> None:
        """Mean 3, standard deviation sqrt(2.5); t at 4 degrees of freedom is 2.776."""
        interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
        assert interval.mean == 3.0
        assert interval.half_width == pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3)

    def test_deviations_of_hostile_values(self) -> None:
        for values in ([0.1] * 7, [1e9 + number / 8 for number in range(5)], [-1e-300, 1e-300], [3.0, -4.0, 1e-9]):
            assert deviation_of(values) == pytest.approx(stdev(values), rel=1e-9, abs=1e-16)

    def test_a_report_of_thousands_of_intervals_counts_in_no_fractions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A comparison of 32 arms and 30 seeds has 50,000 of them, which took seconds of the control plane."""
        monkeypatch.setattr("fractions.Fraction.__new__", None)
        assert Interval.of([1.0, 2.0, 4.0]).half_width > 0

    def test_it_holds_the_mean_in_95_of_100_cases(self) -> None:
        draw = random.Random(0)
        intervals = [Interval.of([draw.gauss(7.0, 1.0) for _ in range(5)]) for _ in range(4000)]
        share = sum(abs(each.mean - 7.0) <= each.half_width for each in intervals) / len(intervals)
        assert share == pytest.approx(0.95, abs=0.01)

    @pytest.mark.parametrize("num_values", [0, 1])
    def test_fewer_values_are_refused(self, num_values: int) -> None:
        with pytest.raises(ValueError, match="allowed: 2 or more"):
            Interval.of([1.0] * num_values)

    @pytest.mark.parametrize(
        ("mean", "verdict"),
        [(0.0, "inside"), (-0.3, "inside"), (0.31, "open"), (0.7, "open"), (0.71, "outside"), (-0.71, "outside")],
    )
    def test_verdict(self, mean: float, verdict: str) -> None:
        assert Interval(mean, 0.2).verdict(0.5) == verdict


def test_gaps_are_paired() -> None:
    assert gaps([2.2, 1.0], [2.0, 2.0]) == [pytest.approx(0.1), -0.5]
    with pytest.raises(ValueError, match="longer"):
        gaps([1.0], [1.0, 2.0])


def test_a_setting_is_calm_up_to_a_third_of_the_limit() -> None:
    assert why_not_calm(0.0008, 0.0025) is None
    assert "moves its final loss by 0.090%; allowed: 0.083%" in str(why_not_calm(0.0009, 0.0025))


@pytest.mark.parametrize(("num_first", "num_planned"), [(2, 2), (2, 3), (2, 5), (2, 20), (5, 5), (5, 20)])
def test_the_errors_of_all_looks_add_up(num_first: int, num_planned: int) -> None:
    errors = [error_of_look(number, num_planned, num_first) for number in range(num_first, num_planned + 1)]
    assert sum(errors) == pytest.approx(ERROR)
    assert errors[num_first > 2 :] == sorted(errors[num_first > 2 :]), "of looks after the first, which has what came before it"


def test_the_first_look_waits_for_as_many_values_as_it_is_to_have() -> None:
    values = [0.0, 1e-6, -1e-6, 0.0, 1e-6]
    assert look(values[:4], TOLERANCE, NUM_SEEDS, num_first=5) is None
    found = look(values, TOLERANCE, NUM_SEEDS, num_first=5)
    assert found is not None
    assert (found.num_values, found.answer) == (5, "yes")


def test_a_twin_is_called_different_in_at_most_5_of_100_and_a_bad_recipe_found_in_95() -> None:
    """Simulate 2,000 comparisons each, which stop at the first certain look. One without a correction is wrong more often."""
    draw = random.Random(1)
    deviation = TOLERANCE / 3  # as wild as `why_not_calm` lets a setting be
    outcomes: dict[str, Counter[str]] = {"twin": Counter(), "bad": Counter(), "naive twin": Counter()}
    for kind, mean in (("twin", 0.0), ("bad", 3 * TOLERANCE), ("naive twin", 0.0)):
        for _ in range(2000):
            values = [draw.gauss(mean, deviation) for _ in range(NUM_SEEDS)]
            if kind == "naive twin":
                looks = [Interval.of(values[:number]) for number in range(2, NUM_SEEDS + 1)]
                outcomes[kind]["distinct"] += any(not each.is_zero for each in looks)
                continue
            found = look(values, TOLERANCE, NUM_SEEDS)
            assert found is not None
            outcomes[kind][found.answer] += 1
            outcomes[kind]["distinct"] += not found.interval.is_zero
            outcomes[kind]["seeds"] += found.num_values
    assert outcomes["twin"]["no"] <= 0.01 * 2000
    assert outcomes["twin"]["distinct"] <= 0.05 * 2000 < outcomes["naive twin"]["distinct"]
    assert outcomes["bad"]["no"] >= 0.95 * 2000
    assert outcomes["bad"]["seeds"] < 2000 * NUM_SEEDS, "none stopped early"


def test_a_gap_as_large_as_the_tolerance_is_called_too_large_in_at_most_5_of_100() -> None:
    draw = random.Random(2)
    answers: Counter[str] = Counter()
    for _ in range(2000):
        found = look([draw.gauss(TOLERANCE, TOLERANCE / 3) for _ in range(NUM_SEEDS)], TOLERANCE, NUM_SEEDS)
        assert found is not None
        answers[found.answer] += 1
    assert answers["no"] + answers["yes"] <= 0.05 * 2000
    assert min(answers["no"], answers["yes"]) > 0


def test_looking_stops_at_the_first_certain_answer() -> None:
    clear = [0.02, 0.02 + 1e-9, 0.02 - 1e-9, -5.0]
    found = look(clear, TOLERANCE, 4)
    assert found is not None
    assert (found.num_values, found.answer) == (2, "no")
    assert look([0.1], TOLERANCE, 5) is None
    exact = look([0.0, 0.0], TOLERANCE, 5)
    assert exact is not None
    assert (exact.answer, exact.interval) == ("yes", Interval(0.0, 0.0))


def test_the_estimate_of_what_is_needed_is_enough_if_mean_and_spread_stay() -> None:
    values = [0.0, 0.002]
    number = num_needed(values, TOLERANCE, 3)
    assert number is not None
    more = [0.001 + (0.001 if place % 2 else -0.001) for place in range(number)]
    found = look(more, TOLERANCE, max(number, 3))
    assert found is not None
    assert found.answer == "yes"
    assert num_needed([TOLERANCE, TOLERANCE], TOLERANCE, 5) is None
    assert num_needed(values, TOLERANCE, None) == 6
