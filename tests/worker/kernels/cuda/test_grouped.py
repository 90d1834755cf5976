"""Products of runs by weights of their own: codes equal the twin's bit for bit, products up to the order of sums."""

import pytest
import torch
from torch import Tensor

from octet.worker.kernels import LinearFormats, Operand, Operands, grouped_reference
from octet.worker.kernels.cuda import gemm, grouped, language
from octet.worker.kernels.scales import OperandFormat
from tests.worker.kernels.cuda.test_gemm import DEVICE, SUMMED, assert_equal_sums

E4M3, E5M2, FP32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
COUNTS = {"even": [32, 32, 32], "skewed": [131, 1, 17], "empty": [0, 40, 0, 33, 0], "no rows": [0, 0]}
TENSOR = OperandFormat().kind


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    if language.INTERPRETED:
        monkeypatch.setattr(gemm, "platform", lambda _device: (gemm.HOPPER, (13, 0)))


def drawn(*shape: int, seed: int) -> Tensor:
    """Magnitudes differ from row to row, so that a run with another's scale is seen."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(
        DEVICE
    )


def weights_of(held: str, num: int, shape: tuple[int, int]) -> Operands:
    """Make weights that layers hold as "values", FP16 codes ("scaled"), or E4M3 codes ("codes")."""
    values = list(drawn(num, *shape, seed=1).unbind())
    if held == "values":
        return Operands(values, [], [])
    dtype = torch.float16 if held == "scaled" else E4M3
    made = [grouped_reference.reference.quantize(each, dtype, TENSOR, 0, None) for each in values]
    amaxes = [each.abs().amax() for each in values] if held == "scaled" else []
    return Operands([codes for codes, _ in made], [scale for _, scale in made], amaxes)


def bits(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.dtype in (E4M3, E5M2) else part


def same(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(bits(found), bits(expected))


def close(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    tolerance = SUMMED if found.dtype == FP32 else 2**-7
    if found.numel():
        assert_equal_sums(found.float(), expected.float(), tolerance)


@pytest.mark.system
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(
    ("held", "is_transposed", "shape"),
    [
        ("values", False, (48, 144)),
        ("scaled", True, (144, 48)),
        ("scaled", False, (40, 24)),
        ("codes", False, (144, 160)),
        pytest.param("codes", True, (160, 144), marks=pytest.mark.matrix),
    ],
)
def test_both_passes(kind: str, held: str, is_transposed: bool, shape: tuple[int, int]) -> None:
    counts, formats = COUNTS[kind], LinearFormats(is_transposed=is_transposed)
    weights = weights_of(held, len(counts), shape)
    num_in, num_out = shape if is_transposed else shape[::-1]
    x, grad = drawn(sum(counts), num_in, seed=2), drawn(sum(counts), num_out, seed=3)
    expected = grouped_reference.grouped_output(Operand(x), counts, weights, formats, FP32, True)
    found = grouped.grouped_output(Operand(x), counts, weights, formats, FP32, True)
    close(found[0], expected[0])
    same(filled(found[1], counts), filled(expected[1], counts))
    for one, other in zip(found[2:], expected[2:], strict=True):
        same(one, other)
    if held == "values":
        weights = weights._replace(amaxes=list(expected[-1].unbind()))
    columns = Operand(expected[1], expected[2])
    for sides in ("rows", "columns", "both"):
        arguments = (Operand(grad), counts, columns, weights, formats, sides, False, FP32, BF16)
        pairs = zip(grouped.grouped_gradients(*arguments), grouped_reference.grouped_gradients(*arguments), strict=True)
        for one, other in pairs:
            close(one, other)
    if found[0].numel():
        assert (found[0] != 0).any()


def filled(columns_KP: Tensor, counts: list[int]) -> Tensor:
    """The columns up to the last run's end: nobody reads the rest."""
    last = sum(-(-count // 16) * 16 for count in counts)
    return columns_KP.view(torch.uint8)[:, :last]


@pytest.mark.parametrize("sides", ["rows", "columns", "both"])
def test_operands_that_come_in_codes(sides: str) -> None:
    """Ranks exchange rows alone, which are laid out the other way round here."""
    counts, formats = COUNTS["skewed"], LinearFormats()
    weights = weights_of("scaled", len(counts), (48, 32))
    scales = torch.tensor([0.5, 2.0, 8.0], device=DEVICE)
    x = Operand(grouped_reference.reference.quantize(drawn(sum(counts), 32, seed=2), E4M3, TENSOR, 0, None)[0], scales)
    grad = Operand(grouped_reference.reference.quantize(drawn(sum(counts), 48, seed=3), E5M2, TENSOR, 0, None)[0], scales / 4)
    expected, found = (twin.grouped_output(x, counts, weights, formats, BF16, True) for twin in (grouped_reference, grouped))
    close(found[0], expected[0])
    same(filled(found[1], counts), filled(expected[1], counts))
    same(found[2], expected[2])
    arguments = (grad, counts, Operand(expected[1], expected[2]), weights, formats, sides, False, FP32, FP32)
    pairs = zip(grouped.grouped_gradients(*arguments), grouped_reference.grouped_gradients(*arguments), strict=True)
    for one, other in pairs:
        close(one, other)


def test_amaxes_to_scale_by() -> None:
    """Windows of past steps say them; where they are too small, codes saturate."""
    counts, formats, known = COUNTS["skewed"], LinearFormats(), torch.tensor([0.5, 3.0, 1000.0], device=DEVICE)
    weights = weights_of("values", len(counts), (48, 32))._replace(amaxes=list(known.unbind()))
    x = Operand(drawn(sum(counts), 32, seed=2), None, known)
    grad = Operand(drawn(sum(counts), 48, seed=3), None, known / 8)
    expected, found = (twin.grouped_output(x, counts, weights, formats, FP32, True) for twin in (grouped_reference, grouped))
    close(found[0], expected[0])
    same(filled(found[1], counts), filled(expected[1], counts))
    same(found[2], expected[2])
    assert len(found) == len(expected) == 3, "the weights' amaxes are known"
    arguments = (grad, counts, Operand(expected[1], expected[2]), weights, formats, "both", False, FP32, FP32)
    for one, other in zip(grouped.grouped_gradients(*arguments), grouped_reference.grouped_gradients(*arguments), strict=True):
        close(one, other)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_find_the_amaxes_of_what_they_write(dtype: torch.dtype, is_transposed: bool) -> None:
    """Values are rounded to their dtype, tiles are partial, one run has no rows, and one a value that is not finite."""
    counts, formats = [20, 0, 33, 16], LinearFormats(is_transposed=is_transposed)
    shape = (144, 136) if is_transposed else (136, 144)
    num_in, num_out = shape if is_transposed else shape[::-1]
    weights = weights_of("scaled", len(counts), shape)
    x, grad = drawn(sum(counts), num_in, seed=2), drawn(sum(counts), num_out, seed=3)
    grad[-1, 5] = torch.inf
    columns = Operand(*grouped_reference.grouped_output(Operand(x), counts, weights, formats, FP32, True)[1:])
    arguments = (Operand(grad), counts, columns, weights, formats, "columns", True, FP32, dtype)
    values, amax_E = grouped.grouped_gradients(*arguments)
    assert values.dtype == dtype
    same(amax_E.nan_to_num(-1), grouped_reference.amax_of_each([*values]).nan_to_num(-1))
    assert amax_E[0] > 0
    assert amax_E[1] == 0
    assert not amax_E[3].isfinite()
    same(amax_E.nan_to_num(-1)[:3], grouped_reference.grouped_gradients(*arguments)[1].nan_to_num(-1)[:3])


@pytest.mark.parametrize("shape", [(3, 40, 144), (2, 129, 17), (0, 8, 8)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_become_codes_each_with_its_scale(shape: tuple[int, int, int]) -> None:
    values = drawn(*shape, seed=4)
    if shape[0] == 2:
        values[1, 3, 5] = torch.inf
    for dtype in (FP32, BF16):
        rounded = values.to(dtype)
        amax_E = grouped_reference.amax_of_each([*rounded]) if len(rounded) else rounded.new_empty(0, dtype=FP32)
        found, expected = (twin.quantize_gradients(rounded, amax_E, E4M3) for twin in (grouped, grouped_reference))
        same(found[0], expected[0])
        same(found[1][:, 0].nan_to_num(-1), expected[1][:, 0].nan_to_num(-1))


@pytest.mark.parametrize("kind", COUNTS)
def test_sums_of_runs(kind: str) -> None:
    counts = COUNTS[kind]
    for dtype in (FP32, BF16):
        values = drawn(sum(counts), 72, seed=5).to(dtype)
        close(grouped.sum_runs(values, counts), grouped_reference.sum_runs(values.float(), counts).to(dtype))


def test_launches_do_not_grow_with_the_weights(launched: list[str]) -> None:
    if not language.INTERPRETED:
        pytest.skip("missing: Triton's interpreter, which counts")
    numbers = []
    for num in (2, 5):
        launched.clear()
        counts, weights = [16] * num, weights_of("scaled", num, (32, 16))
        x = drawn(16 * num, 16, seed=2)
        output, *columns = grouped.grouped_output(Operand(x), counts, weights, LinearFormats(), FP32, True)
        columns = Operand(*columns)
        gradients = grouped.grouped_gradients(
            Operand(output), counts, columns, weights, LinearFormats(), "both", True, FP32, FP32
        )
        grouped.quantize_gradients(*gradients[1:], E4M3)
        numbers.append(len(launched))
    assert numbers == [10, 10]
