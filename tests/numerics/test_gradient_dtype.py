"""Weight gradients that are held in FP8 leave their product in bf16 on an accelerator, and lose next to nothing by it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, kernels
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.kernels.formats import E4M3
from tests.kit.small_model import FP8_LEVELS, Small
from tests.numerics.measure import mixed_magnitudes, relative_error

NAMES = ("first", "inner.0", "inner.2", "last")


class Products(TorchDispatchMode):
    """Records the dtypes that FP8 products return, and what gradients are rounded from."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.rounded: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Float8Gradient) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.octet.linear_gradients.default:
            self.results += [(tuple(gradient.shape), gradient.dtype) for gradient in result]
        if func is torch.ops.octet.quantize_gradient.default:
            self.rounded.append(args[0].dtype)
        return result


def backward(level: str, **options: Any) -> tuple[nn.Module, Products]:
    """Two micro-batches of 24 tokens through a small model at a level."""
    model = Small()
    initialize(model, torch.optim.AdamW(model.parameters()), level, convert_heads=True, **options)
    with Products() as seen:
        for seed in range(2):
            x = torch.randn(24, 32, generator=torch.Generator().manual_seed(seed))
            model(x).float().square().mean().backward()
    return model, seen


def of_weights(model: nn.Module, seen: Products) -> set[torch.dtype]:
    """The dtypes of the products that have a weight's shape: no activation of 24 tokens has."""
    shapes = {tuple(model.get_submodule(name).weight.shape) for name in NAMES}
    return {dtype for shape, dtype in seen.results if shape in shapes}


@pytest.mark.parametrize("level", FP8_LEVELS)
def test_gradients_held_in_fp8_leave_the_product_in_bf16_on_an_accelerator(level: str) -> None:
    _, on_cpu = backward(level)
    with cpu_as_accelerator():
        model, seen = backward(level)
    is_held_in_fp8 = LEVELS[level].weight_gradient == "fp8"
    assert of_weights(model, on_cpu) == {torch.float32}
    assert of_weights(model, seen) == {torch.bfloat16 if is_held_in_fp8 else torch.float32}
    assert seen.rounded == [torch.bfloat16] * (4 if is_held_in_fp8 else 0)
    gradients = [model.get_submodule(name).weight.grad for name in NAMES]
    assert all(isinstance(gradient, Float8Gradient) == is_held_in_fp8 for gradient in gradients)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_gradients_accumulated_in_fp32_stay_in_fp32() -> None:
    with cpu_as_accelerator():
        model, seen = backward("O2", gradient_accumulation="fp32")
    assert of_weights(model, seen) == {torch.float32}
    assert {model.get_submodule(name).weight.grad.dtype for name in NAMES} == {torch.float32}


@pytest.mark.parametrize("is_level", [True, False], ids=["one magnitude", "mixed magnitudes"])
def test_rounding_by_way_of_bf16_costs_one_part_in_160_of_the_error(is_level: bool) -> None:
    """A 32nd of the codes are on the other side of a tie that bf16 made: by one code, and in both directions alike."""
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) if is_level else mixed_magnitudes(1024, 1024)
    direct, by_way = (kernels.quantize_gradient(given, E4M3.dtype) for given in (values, values.bfloat16()))
    assert torch.equal(direct[1], by_way[1])
    steps = by_way[0].view(torch.uint8).short() - direct[0].view(torch.uint8).short()
    share = float((steps != 0).float().mean())
    assert steps.abs().max() == 1
    assert 0.005 < share < 0.034
    assert abs(int(steps.sum())) < 0.15 * int(steps.abs().sum())
    errors = [relative_error(decoded(*codes), values) for codes in (direct, by_way)]
    assert errors[0] < errors[1] < 1.01 * errors[0]
    shrinks = [float(((decoded(*codes) - values) * values.sign()).sum() / values.abs().sum()) for codes in (direct, by_way)]
    assert abs(shrinks[1] - shrinks[0]) < 5e-4


def decoded(codes: Tensor, dequant_scale: Tensor) -> Tensor:
    return kernels.dequantize(codes, dequant_scale)
