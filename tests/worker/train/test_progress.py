"""A run whose loss makes no sense causes a warning and then ends with a reason that says what to change."""

import pytest

from octet.worker.common.errors import Diverged, NonFiniteLoss
from octet.worker.train.progress import Progress, StepTimes

NUM_STEPS = 1000


def note(progress: Progress, *losses: float, stops: bool = True) -> list[str]:
    warnings = []
    for loss in losses:
        progress.step += 1
        warning = progress.note_loss(progress.step, loss, NUM_STEPS, stops=stops)
        warnings += [warning] if warning else []
    return warnings


def test_ten_steps_far_above_the_first_loss_are_warned_of_once() -> None:
    progress = Progress()
    assert note(progress, 5.5, *[11.5] * 9) == []
    (warning,) = note(progress, *[12.0] * 20)
    assert "12 at step 11" in warning
    assert "learning_rate" in warning


def test_a_hundred_such_steps_end_the_run() -> None:
    progress = Progress()
    note(progress, 5.5, *[40.0] * 99)
    with pytest.raises(Diverged, match=r"more than 2 times the loss of the first step, 5\.5"):
        note(progress, 40.0)


def test_a_spike_is_forgiven() -> None:
    progress = Progress()
    note(progress, 5.5)
    for _ in range(20):
        assert note(progress, *[400.0] * 9, 5.0) == []
    assert progress.num_diverging == 0


def test_a_run_that_ends_far_above_its_first_loss_has_failed() -> None:
    progress = Progress()
    note(progress, 5.5, 300.0, 900.0)
    with pytest.raises(Diverged, match="900"):
        progress.check_end(900.0)
    progress.check_end(4.0)


def test_ten_non_finite_losses_end_the_run() -> None:
    progress = Progress()
    note(progress, 5.5, *[float("nan")] * 9, 5.5, *[float("inf")] * 9)
    with pytest.raises(NonFiniteLoss, match="10 steps in a row, up to step 21"):
        note(progress, float("nan"))


def test_a_run_that_may_diverge_is_warned_and_goes_on_to_an_end_that_is_a_number() -> None:
    progress = Progress()
    diverging, not_finite = note(progress, 5.5, *[40.0] * 200, *[float("nan")] * 30, stops=False)
    assert "40 at step 11" in diverging
    assert "10 steps in a row, up to step 211" in not_finite
    progress.check_end(900.0, stops=False)
    for loss in (float("inf"), float("nan")):
        with pytest.raises(NonFiniteLoss, match="not finite at the end, after step 231"):
            progress.check_end(loss, stops=False)


def test_a_run_without_a_finite_loss_has_failed() -> None:
    progress = Progress()
    note(progress, *[float("nan")] * 9)
    with pytest.raises(NonFiniteLoss):
        progress.check_end(4.0)


def test_the_time_of_a_step_is_a_mean_that_sees_every_step_but_the_first() -> None:
    times, progress = StepTimes(num_skipped=1), Progress(step=2, train_time_s=8.0)
    assert times.mean(progress) == 4.0  # none is kept
    assert times.median() is None
    for seconds in (60.0, 1.0, 1.0, 1.0, 9.0):  # it compiles, and samples in the last
        times.add(seconds)
    assert times.mean(progress) == 3.0
    assert times.median() == 1.0
    resumed = StepTimes(num_skipped=1)
    resumed.resume(times.kept)
    resumed.add(70.0)
    assert resumed.mean(progress) == 3.0
