"""Codes that are written with values, completed: what `quantize_operand` makes of the values, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import reference
from octet.worker.kernels.cuda import gates, known_scale, language, normalization
from tests.worker.kernels.cuda.test_quantization import hard_matrix

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, about NaN and overflow
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WINDOW = 0.37


def write(x: Tensor, *how: object) -> list[Tensor]:
    """[values, amax, codes] of an activation that changes nothing of x >= 0."""
    return gates.activate(x, None, "relu", *how)


def normalize(x: Tensor, *how: object) -> list[Tensor]:
    return [part for place, part in enumerate(normalization.normalize(x, None, None, 1e-5, False, x.dtype, *how)) if place != 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "codes_dtype"), [(write, E4M3), (write, E5M2), (normalize, E4M3)])
@pytest.mark.parametrize("uses_amax", [True, False])
def test_completed_codes_are_those_of_the_values(
    make: Callable[..., list[Tensor]], codes_dtype: torch.dtype, uses_amax: bool, dtype: torch.dtype
) -> None:
    for shape, columns, margin in (((1, 1), True, 0), ((3, 129), False, 2), ((130, 257), True, 1)):
        x = hard_matrix(*shape, dtype).abs() if make is write else hard_matrix(*shape, dtype)
        window, uses = torch.tensor(WINDOW, device=DEVICE), torch.tensor(uses_amax, device=DEVICE)
        values, amax, codes = make(x, codes_dtype, margin, window, uses)
        torch.testing.assert_close([values, amax], make(x), rtol=0, atol=0, equal_nan=True)
        expected = reference.quantize_operand(
            values, codes_dtype, kernels.ScaleKind.TENSOR, margin, "both" if columns else "rows", window, uses
        )
        scale, codes_t = known_scale.complete(codes, values, amax, margin, window, uses, columns)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale, expected[1])
        if not columns:
            assert codes_t.shape == (0,)
        else:
            assert torch.equal(codes_t.view(torch.uint8), expected[2].view(torch.uint8))
        twin = torch.zeros_like(values, dtype=codes_dtype) if not uses_amax else codes.clone()
        found = reference.complete(twin, values, amax, margin, window, uses, columns)
        assert torch.equal(twin.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found[0], scale)
        assert not columns or torch.equal(found[1].view(torch.uint8), codes_t.view(torch.uint8))


def test_no_codes_are_written_where_the_amax_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be written twice."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    x, off = torch.ones(4, 32, device=DEVICE), torch.tensor(False, device=DEVICE)
    assert not write(x, E4M3, 0, torch.tensor(1.0, device=DEVICE), off)[2].view(torch.uint8).any()


def test_other_codes_are_refused() -> None:
    how = kernels.KnownScale(E4M3, 0, torch.tensor(1.0), torch.tensor(True))
    x = torch.ones(4, 32)
    with pytest.raises(
        ValueError, match=r"codes \(4, 32\) of torch.float8_e5m2 for x \(4, 32\); allowed: a matrix and its codes"
    ):
        kernels.complete(x.to(E5M2), x, torch.tensor(1.0), how, columns=True)
