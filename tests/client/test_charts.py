"""Charts of losses for terminals: their size, their lines and what they need."""

import math

from octet.client.charts import Line, loss_chart

STEPS = range(1, 201)
FALLING = [5 * math.exp(-step / 60) + 1 for step in STEPS]


def test_a_chart_has_the_size_that_was_asked_for_and_names_its_lines() -> None:
    chart = loss_chart([Line("O2", STEPS, FALLING), Line("fp32", STEPS, FALLING[::-1])], width=78, height=14)
    assert chart is not None
    lines = chart.plain.splitlines()
    assert len(lines) == 14
    assert max(map(len, lines)) <= 78
    assert all(any(name in line for line in lines) for name in ("O2", "fp32"))
    assert lines[-1].split() == ["1", "51", "100", "150", "200"]
    assert len({span.style for span in chart.spans}) >= 2, "each line has a colour"


def test_the_ends_of_the_axis_are_the_least_and_the_greatest_loss() -> None:
    chart = loss_chart([Line("a", STEPS, FALLING)], width=60, height=10)
    assert chart is not None
    ticks = [float(line.partition("┤")[0]) for line in chart.plain.splitlines() if "┤" in line]
    assert abs(max(ticks) - max(FALLING)) < 0.01
    assert abs(min(ticks) - min(FALLING)) < 0.01


def test_losses_that_are_not_finite_are_left_out() -> None:
    assert loss_chart([Line("a", [1, 2, 3], [3.0, None, 2.0])], width=60, height=10) is not None


def test_a_line_needs_two_points() -> None:
    assert loss_chart([Line("a", [1], [3.0]), Line("b", [1, 2], [None, 2.0])], width=60, height=10) is None
    assert loss_chart([], width=60, height=10) is None


def test_a_second_chart_has_nothing_of_the_first() -> None:
    loss_chart([Line("first", STEPS, FALLING)], width=60, height=10)
    chart = loss_chart([Line("second", STEPS, FALLING)], width=60, height=10)
    assert chart is not None
    assert "first" not in chart.plain
