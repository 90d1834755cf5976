"""Delayed scaling: exact until the window is full, then from the window; one slot a step; restarts; no trace of evaluation."""

import pytest
import torch
from torch import Tensor

from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.operand import REMEMBERED, OperandScaling, advance
from octet.worker.fp8.recipe import E4M3, Recipe
from octet.worker.kernels import Operand, ScaleKind, dequant_scale_from_amax
from octet.worker.kernels.scales import OperandFormat


def make(**recipe: object) -> OperandScaling:
    spec = RecipeSpec(scaling="delayed", **{"amax_history_length": 3, **recipe})
    return OperandScaling(Recipe.resolve(spec), OperandFormat(), torch.device("cpu"))


def scale_of(scaling: OperandScaling, amax: float) -> float:
    """The dequant_scale with which a tensor of that amax is quantized now."""
    codes, _ = scaling.quantize(torch.tensor([[0.0, amax]]))
    assert codes is not None
    return codes.dequant_scale.item()


def exact(amax: float) -> float:
    return dequant_scale_from_amax(torch.tensor(amax), E4M3).item()


def run_steps(scaling: OperandScaling, *amaxes: float) -> list[float]:
    scales = []
    for amax in amaxes:
        scales.append(scale_of(scaling, amax))
        advance([scaling])
    return scales


def test_exact_until_the_window_is_full_then_the_largest_of_the_window() -> None:
    scaling = make()
    assert run_steps(scaling, 8, 4, 2) == [exact(8), exact(4), exact(2)]
    assert run_steps(scaling, 1, 1, 1, 1) == [exact(8), exact(4), exact(2), exact(1)]


def test_most_recent() -> None:
    scaling = make(amax_compute_algorithm="most_recent")
    assert run_steps(scaling, 8, 4, 2, 16, 1)[3:] == [exact(2), exact(16)]


def test_what_outgrows_the_window_saturates() -> None:
    scaling = make(amax_history_length=1)
    run_steps(scaling, 1.0)
    codes, _ = scaling.quantize(torch.tensor([[1000.0, -1.0]]))
    assert codes is not None
    values = codes.codes.float() * codes.dequant_scale
    assert values.tolist() == [[448 * exact(1.0), -1.0]]


def test_micro_batches_of_a_step_share_one_slot() -> None:
    scaling = make(amax_history_length=1)
    for amax in (2.0, 32.0, 4.0):
        assert scale_of(scaling, amax) == exact(amax)
    advance([scaling])
    assert scale_of(scaling, 1.0) == exact(32)


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_a_non_finite_amax_restarts_the_window(wrong: float) -> None:
    scaling = make()
    run_steps(scaling, 8, 8, 8)
    codes, _ = scaling.quantize(torch.tensor([[1.0, wrong]]))
    assert codes is not None
    assert codes.dequant_scale.item() == exact(8)
    assert codes.codes.float().isnan().tolist() == [[False, True]]
    advance([scaling])
    assert run_steps(scaling, 1, 2, 4, 1) == [exact(1), exact(2), exact(4), exact(4)]


def test_evaluation_leaves_no_trace() -> None:
    scaling = make(amax_history_length=1)
    run_steps(scaling, 1)
    before = {name: value.clone() for name, value in scaling.state_dict().items()}
    scaling.eval()
    assert scale_of(scaling, 100) == exact(1)
    assert all(torch.equal(value, before[name]) for name, value in scaling.state_dict().items())


def test_a_step_in_which_the_layer_did_not_run_is_not_counted() -> None:
    scaling = make(amax_history_length=2)
    run_steps(scaling, 8, 4)
    advance([scaling])
    advance([scaling])
    assert scale_of(scaling, 1) == exact(8)


def test_the_interval_holds_a_scale() -> None:
    scaling = make(amax_history_length=1, interval=3)
    scales = run_steps(scaling, *[2.0**step for step in range(8)])
    # The window is full after step 1; from then on every third step counts.
    assert scales == [exact(1), exact(1), exact(1), exact(4), exact(4), exact(4), exact(32), exact(32)]


def test_a_history_restores_to_the_bit() -> None:
    one, other = make(), make()
    run_steps(one, 8, 4)
    scale_of(one, 5)
    other.load_state_dict(one.state_dict())
    for scaling in (one, other):
        advance([scaling])
    assert run_steps(one, 1, 2, 3, 4) == run_steps(other, 1, 2, 3, 4)


def test_tensors_scales_transpose_with_their_codes() -> None:
    values: Tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    rows, columns = OperandScaling(Recipe(), OperandFormat(), torch.device("cpu")).quantize(values)
    assert rows is not None
    assert columns is not None
    assert torch.equal(rows.codes.t().float(), columns.codes.float())
    assert OperandScaling(Recipe(), OperandFormat(), torch.device("cpu")).quantize(values, rows=False, columns=False) == (
        None,
        None,
    )


@pytest.mark.parametrize("kind", ScaleKind)
def test_columns_are_the_rows_of_the_transposed_matrix(kind: ScaleKind) -> None:
    values = torch.randn(300, 260, generator=torch.Generator().manual_seed(0))
    scaling = OperandScaling(Recipe(), OperandFormat(E4M3, kind), torch.device("cpu"))
    expected, _ = scaling.quantize(values.t(), columns=False)
    assert expected is not None
    rows, columns = scaling.quantize(values)
    alone = scaling.quantize(values, rows=False)
    assert rows is not None
    assert alone[0] is None
    for codes in (columns, alone[1]):
        assert codes is not None
        assert torch.equal(codes.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(codes.dequant_scale, expected.dequant_scale)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_history_is_of_values_whatever_their_stored_scale(is_sampled: bool) -> None:
    """A weight's FP16 scale moves with the optimizer's steps; its amax window must not see that."""
    scaling, values = make(), torch.tensor([[0.5, 3.0]])
    scaling.is_sampled = is_sampled
    for number in (1.0, 4.0, 0.25, 2.0**-10, 2.0**8):
        held = Operand(values / number, torch.tensor(number), torch.tensor(3.0))
        operand = scaling.weight_operand(held, "rows")
        assert operand.amax == 3.0
        assert operand.dequant_scale is not None
        if is_sampled:  # then it comes in codes
            assert operand.data.dtype == E4M3
            assert operand.dequant_scale.item() == exact(3.0)
        assert torch.equal(operand.data.float() * operand.dequant_scale, values)
        advance([scaling])
    assert scaling.amax_history.tolist() == [3.0, 3.0, 3.0]


def test_windows_that_close_together_are_those_that_close_alone() -> None:
    """By two rules: windows that are full, that start, that were not used, and whose step was not finite."""
    rules = ({}, {"amax_history_length": 2, "amax_compute_algorithm": "most_recent", "interval": 2})
    together, alone = ([make(**rules[number % 2]) for number in range(12)] for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    for _ in range(7):
        for one, other in zip(together, alone, strict=True):
            kind, amax = int(torch.randint(5, (), generator=draw)), float(torch.rand((), generator=draw))
            for scaling in (one, other):
                scaling.step_amax.fill_(0.0 if kind == 0 else torch.inf if kind == 1 else amax)
            advance([other])
        advance(together)
        for one, other in zip(together, alone, strict=True):
            for name in REMEMBERED:
                assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert len({float(scaling.window_amax) for scaling in together}) > 6
