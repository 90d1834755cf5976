"""A batch without elements, as an expert without tokens sees one, counts as nothing: zero gradients, and no trace."""

import math

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import fp8_statistics, initialize
from octet.worker.fp8.operand import OperandScaling
from octet.worker.kernels import ScaledCodes, ScaleKind, measure, quantize

RECIPES = [
    {"granularity": "row"},
    {"granularity": "block"},
    {"scaling": "delayed", "amax_history_length": 2},
    *({"high_precision_gemms": [gemm]} for gemm in ("output", "grad_input", "grad_weight")),
]
ROWWISE = {"granularity": "row", "format": "E4M3"}
CASES = [
    *((level, {}) for level in LEVELS),
    *((level, {"recipe": recipe}) for level in ("te", "O2", "O3") for recipe in RECIPES),
    *(("O2", {"statistics_every": 1, "recipe": recipe}) for recipe in ({}, *RECIPES)),
    *(("ao", {"recipe": recipe}) for recipe in (ROWWISE, ROWWISE | {"high_precision_gemms": ["grad_weight"]})),
]
SHAPES = [(0, 32), (3, 0, 32)]
CASES_OF_SHAPES = [
    pytest.param(*case, shape, marks=pytest.mark.matrix if shape == SHAPES[1] and case[1] else ())
    for case in CASES
    for shape in SHAPES
]
"""Both shapes at each level; by each recipe, three dimensions only in the matrix."""


def make(level: str, options: dict[str, object]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))
    return initialize(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), opt_level=level, **options)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def memory(model: nn.Module) -> list[Tensor]:
    """Return the buffers of delayed scaling, and the newest samples. NaN stands for no sample."""
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    return [buffer.clone() for scaling in scalings for buffer in scaling.buffers()]


@pytest.mark.parametrize(("level", "options", "shape"), CASES_OF_SHAPES, ids=str)
def test_the_gradients_of_an_empty_batch_are_zero(level: str, options: dict[str, object], shape: tuple[int, ...]) -> None:
    model, optimizer = make(level, options)
    for needs_grad in (True, False):
        before = memory(model)
        x = torch.empty(shape).requires_grad_(needs_grad)
        output = model(x)
        assert output.shape == (*shape[:-1], 48)
        output.sum().backward()
        assert all(torch.equal(parameter.grad + 0, torch.zeros(parameter.shape)) for parameter in model.parameters())
        if needs_grad:
            assert x.grad is not None
            assert x.grad.shape == x.shape
        assert all(map(same, memory(model), before))
        optimizer.step()


@pytest.mark.parametrize(("level", "options"), CASES, ids=str)
def test_an_empty_micro_batch_changes_no_accumulated_gradient(level: str, options: dict[str, object]) -> None:
    model, _ = make(level, options)
    model(batch(8, 32)).mean().backward()
    gradients, before = [parameter.grad + 0 for parameter in model.parameters()], memory(model)
    model(torch.empty(0, 32)).sum().backward()
    assert all(torch.equal(parameter.grad + 0, old) for parameter, old in zip(model.parameters(), gradients, strict=True))
    assert all(map(same, memory(model), before))


def test_a_step_of_empty_batches_leaves_the_windows_as_they_were() -> None:
    model, optimizer = make("O2", {"recipe": RECIPES[2], "statistics_every": 1})
    model(batch(8, 32)).mean().backward()
    optimizer.step()
    before, samples = memory(model), fp8_statistics(model)
    optimizer.zero_grad()
    model(torch.empty(0, 32)).sum().backward()
    optimizer.step()
    assert all(map(same, memory(model), before))
    assert fp8_statistics(model) == samples


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_nothing_is_measured_of_nothing(shape: tuple[int, int]) -> None:
    values = torch.empty(shape)
    numbers = measure(values, ScaledCodes(*quantize(values, torch.float8_e4m3fn), ScaleKind.TENSOR))
    assert all(math.isnan(number) for number in numbers.tolist())


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0))
