"""Clipping: the bits of torch's own function, on plain gradients and on those of ours."""

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.worker import initialize
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.optim import clip_grad_norm_
from tests.kit.small_model import FP8_LEVELS, make, spread

TORCHS_OPS = dict.fromkeys(
    ("_foreach_norm", "stack", "linalg_vector_norm", "add", "reciprocal", "mul", "clamp", "_foreach_mul_"), 1
)
"""torch's ops, each called once. `_foreach_norm` and `_foreach_mul_` take all gradients; the others work on norms alone."""


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, float("inf")])
@pytest.mark.parametrize("level", ["bf16-amp", *spread(FP8_LEVELS)])
def test_the_bits_are_torch_s(level: str, max_norm: float) -> None:
    model, _ = make(level)
    model(torch.randn(8, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    twin = copy.deepcopy(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = copy.deepcopy(one.grad)
    norm, expected = clip_grad_norm_(model.parameters(), max_norm), nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    assert float(norm) == float(expected) > 0
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad.float(), other.grad.float())
        assert one.grad.dtype == other.grad.dtype


def test_mixed_dtypes_and_missing_gradients() -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    parameters = [nn.Parameter(torch.zeros(3 + number, 5, dtype=dtype)) for number, dtype in enumerate(dtypes)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters.append(nn.Parameter(torch.zeros(2)))
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for parameter, twin in zip(parameters, twins, strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    assert float(clip_grad_norm_(parameters, 0.5)) == float(nn.utils.clip_grad_norm_(twins, 0.5))
    for parameter, twin in zip(parameters[:-1], twins[:-1], strict=True):
        assert torch.equal(parameter.grad, twin.grad)
    assert parameters[-1].grad is None


def test_without_a_gradient_the_norm_is_zero() -> None:
    assert float(clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0)) == 0


class Ops(TorchDispatchMode):
    """Counts the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def layers_with_gradients(num_layers: int) -> nn.Module:
    """Linear layers at O2 after a backward pass: weights' gradients are in FP8, biases' in fp32."""
    model, _ = initialize(nn.Sequential(*(nn.Linear(32, 32) for _ in range(num_layers))), None, "O2")
    model(torch.randn(8, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    kinds = Counter(type(parameter.grad) for parameter in model.parameters())
    assert kinds == {Float8Gradient: num_layers, torch.Tensor: num_layers}
    return model


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([(parameter.grad + 0).reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("is_accelerator", [False, True])
@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0, 3])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, clip_grad_norm_], ids=["torch's", "ours"])
def test_clipping_is_a_few_ops_for_all_gradients_and_decodes_none(
    clip: Any, order: float, is_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, in FP8 and in fp32."""
    found, options = [], {} if clip is clip_grad_norm_ else {"norm_type": order}
    order = order if options else 2.0
    for num_layers in (1, 5):
        model = layers_with_gradients(num_layers)
        before = values_of(model)
        norm = float(torch.linalg.vector_norm(before.double(), order))
        with monkeypatch.context() as patch, cpu_as_accelerator() if is_accelerator else nullcontext(), Ops() as ops:
            patch.setattr(Float8Gradient, "dequantize", None)
            clipped = clip(model.parameters(), norm / 2, **options)
        assert type(clipped) is torch.Tensor
        assert float(clipped) == pytest.approx(norm)
        torch.testing.assert_close(values_of(model), before / 2, rtol=1e-4, atol=0)
        views = ("detach", "view", "unbind", "slice", "select")
        found.append({name: times for name, times in ops.found.items() if name not in views})
    if clip is clip_grad_norm_:
        assert found == [{"total_norm": 1, "clip_": 1}] * 2
    else:
        assert found == [TORCHS_OPS] * 2


def test_without_foreach_torch_s_function_takes_gradients_in_turn_and_decodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """foreach=False asks for an op for each gradient: its norm and its scale."""
    model = layers_with_gradients(3)
    before = values_of(model)
    norm = float(before.norm())
    with monkeypatch.context() as patch, Ops() as ops:
        patch.setattr(Float8Gradient, "dequantize", None)
        clipped = nn.utils.clip_grad_norm_(model.parameters(), norm / 2, foreach=False)
    assert float(clipped) == pytest.approx(norm)
    assert ops.found["linalg_vector_norm"] == 6 + 1
    assert ops.found["_to_copy"] == 0
    torch.testing.assert_close(values_of(model), before / 2, rtol=1e-4, atol=0)


def test_error_if_nonfinite_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers_with_gradients(2)
    norm = float(values_of(model).norm())
    with monkeypatch.context() as patch:
        patch.setattr(Float8Gradient, "dequantize", None)
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)) == pytest.approx(norm)
        model[0].weight.grad.dequant_scale.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).isnan()
    assert values_of(model).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_gradients_of_other_dtypes_are_clipped_with_those_in_fp8(dtype: torch.dtype) -> None:
    """Complex ones by torch's own ops, which take the two dtypes apart."""
    model = layers_with_gradients(2)
    other = nn.Parameter(torch.zeros(5, dtype=dtype))
    other.grad = torch.arange(5).to(dtype)
    norm = float((values_of(model).square().sum() + 30) ** 0.5)
    for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
        found = clip([*model.parameters(), other], norm / 2)
        assert float(found) == pytest.approx(norm, rel=1e-3)
        norm /= 2
    torch.testing.assert_close(other.grad, torch.arange(5).to(dtype) / 4, rtol=2**-7, atol=0)


def test_gradients_of_plain_models_are_torch_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process in which there are gradients in FP8."""
    layers_with_gradients(1)
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    with Ops() as ops:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert ops.found["total_norm"] == ops.found["clip_"] == 0
    assert ops.found["_foreach_mul_"] == 1


@pytest.mark.parametrize("order", [0, -1.0])
def test_torch_s_other_orders_decode_one_gradient_at_a_time(order: float) -> None:
    model = layers_with_gradients(2)
    wide = [nn.Parameter(torch.zeros(parameter.shape)) for parameter in model.parameters()]
    for parameter, narrow in zip(wide, model.parameters(), strict=True):
        parameter.grad = narrow.grad + 0
    found, expected = (nn.utils.clip_grad_norm_(parameters, 0.5, order) for parameters in (model.parameters(), wide))
    assert float(found) == pytest.approx(float(expected))


def test_a_gradient_that_a_backward_pass_still_needs_is_known_to_have_changed() -> None:
    model, leaf = layers_with_gradients(1), torch.ones(3, requires_grad=True)
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    product = (leaf * plain.grad).sum()
    nn.utils.clip_grad_norm_([*model.parameters(), plain], 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
