"""The error of a converted layer's gradient after 1, 8 and 32 independent micro-batches, in FP8 and in fp32, over five seeds.

    python -m tests.numerics.test_gradient_accumulation

prints the table of docs/log.md. Inputs and gradients of outputs are Gaussian, and nothing is shared between micro-batches,
which is the worst case: a sum grows by the root of their number, and each addition rounds all of it. The error is that of
the product in FP8 and of the sum together, against NumPy's fp64.
"""

import math
import statistics
import sys
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import nn

from octet.api_schemas import JobSpec, PrecisionSpec
from octet.worker import initialize, memory_report
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.gradient import Float8Gradient

SEEDS, TOKENS, WIDTH = range(5), 128, 128
NUMBERS = (1, 4, 8, 16, 32)
T_95 = 2.776
"""Student's t for five seeds and an interval of 95 %."""
Format = Literal["fp8", "fp32"]


@cache
def error(held: Format, num_micro_batches: int, seed: int) -> float:
    """Return the norm of the difference over the norm of the gradient in fp64."""
    torch.manual_seed(seed)
    model, _ = initialize(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), None, "O2", gradient_accumulation=held, seed=seed)
    exact = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for _ in range(num_micro_batches):
        input, grad_output = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
        model(input).backward(grad_output)
        exact += grad_output.double().t() @ input.double()
    [gradient] = [parameter.grad for parameter in model.parameters()]
    assert gradient is not None
    assert isinstance(gradient, Float8Gradient) == (held == "fp8")
    found = gradient.dequantize() if isinstance(gradient, Float8Gradient) else gradient
    return float((found.double() - exact).norm() / exact.norm())


def mean_and_interval(held: Format, num_micro_batches: int) -> tuple[float, float]:
    """Return the mean over the seeds and half the 95 % interval."""
    errors = [error(held, num_micro_batches, seed) for seed in SEEDS]
    return statistics.mean(errors), T_95 * statistics.stdev(errors) / math.sqrt(len(errors))


@pytest.mark.parametrize(("num_micro_batches", "least", "most"), [(1, 0.060, 0.070), (8, 0.095, 0.105), (32, 0.155, 0.175)])
def test_gradients_in_fp8_lose_with_every_micro_batch(num_micro_batches: int, least: float, most: float) -> None:
    mean, half = mean_and_interval("fp8", num_micro_batches)
    assert least < mean - half
    assert mean + half < most


@pytest.mark.parametrize("num_micro_batches", [1, 8, 32])
def test_gradients_in_fp32_keep_the_error_of_the_products(num_micro_batches: int) -> None:
    mean, half = mean_and_interval("fp32", num_micro_batches)
    assert mean - half > 0.055
    assert mean + half < 0.063


def job(spec_document: dict[str, Any], num_micro_batches: int, **fields: Any) -> JobSpec:
    training = spec_document["training"] | {"global_batch_size": 16 * num_micro_batches, "micro_batch_size": 16}
    return JobSpec.model_validate(spec_document | {"training": training} | fields)


@pytest.mark.parametrize(
    ("num_micro_batches", "precision", "expected"),
    [
        (1, {}, "fp8"),
        (4, {}, "fp8"),
        (5, {}, "fp32"),
        (32, {}, "fp32"),
        (32, {"gradient_accumulation": "fp8"}, "fp8"),
        (1, {"gradient_accumulation": "fp32"}, "fp32"),
        (1, {"level": "te"}, "fp32"),
    ],
)
def test_a_job_holds_gradients_in_what_its_resolved_precision_says(
    spec_document: dict[str, Any], num_micro_batches: int, precision: dict[str, Any], expected: Format
) -> None:
    """The rank's configuration and the bytes of its memory report; `validate` shows the same field."""
    config = resolve(job(spec_document, num_micro_batches, precision=precision), RankEnv())
    assert config.precision.gradient_accumulation != "auto"
    assert config.precision.holds_fp8_gradients == (expected == "fp8")
    model, optimizer = initialize(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), None, config.precision)
    model(torch.randn(16, WIDTH)).sum().backward()
    num_bytes = memory_report(model, optimizer, converted_only=True)["gradients"]
    assert num_bytes == WIDTH * WIDTH * (1 if expected == "fp8" else 4)


def test_from_zero_stage_2_on_no_rank_holds_a_sum_of_micro_batches(spec_document: dict[str, Any]) -> None:
    for stage, expected in ((1, "fp32"), (2, "fp8"), (3, "fp8")):
        divided = {"parallelism": {"zero_stage": stage}, "resources": {"workers": 2}}
        spec = job(spec_document, 32, **divided)
        assert spec.batch.num_micro_batches == 16
        assert spec.resolved_precision.gradient_accumulation == expected


def test_fewer_workers_resolve_their_own_number_of_micro_batches(spec_document: dict[str, Any]) -> None:
    spec = job(spec_document, 8, resources={"workers": 2, "min_workers": 1})
    assert spec.resolved_precision.gradient_accumulation == "fp8"
    assert spec.with_workers(1).resolved_precision.gradient_accumulation == "fp32"


def test_initialize_takes_no_auto_and_keeps_fp8() -> None:
    """It does not know the number of micro-batches; a whole PrecisionSpec that says auto is fp8."""
    with pytest.raises(ValueError, match="gradient_accumulation: got auto; allowed: fp8, fp32"):
        initialize(nn.Linear(WIDTH, WIDTH), None, "O2", gradient_accumulation="auto")
    for options in ({}, {"opt_level": PrecisionSpec()}):
        model, _ = initialize(nn.Sequential(nn.Linear(WIDTH, WIDTH)), None, **options)
        model(torch.randn(16, WIDTH)).sum().backward()
        assert isinstance(model[0].weight.grad, Float8Gradient)


def table() -> str:
    """Return the rows of the table, as Markdown."""
    rows = []
    for number in NUMBERS:
        found = [mean_and_interval(held, number) for held in ("fp8", "fp32")]
        rows.append(f"| {number} | {' | '.join(f'{100 * mean:.2f} ± {100 * half:.2f} %' for mean, half in found)} |\n")
    return "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table())
