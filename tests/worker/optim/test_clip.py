"""Clipping: the bits of torch's own function, on plain gradients and on those of ours."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.small import FP8_LEVELS, make
from worker import initialize
from worker.fp8.gradient import Float8Gradient
from worker.optim import clip_grad_norm_


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, float("inf")])
@pytest.mark.parametrize("level", ["bf16-amp", *FP8_LEVELS])
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


def test_torch_s_own_function_takes_all_gradients_at_once_and_decodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ops read or write gradients, however many there are, in FP8 and in fp32."""
    found = []
    for num_layers in (1, 5):
        model, _ = initialize(nn.Sequential(*(nn.Linear(32, 32) for _ in range(num_layers))), None, "O2")
        model(torch.randn(8, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        kinds = Counter(type(parameter.grad) for parameter in model.parameters())
        assert kinds == {Float8Gradient: num_layers, torch.Tensor: num_layers}
        norm = sum(float((parameter.grad + 0).square().sum()) for parameter in model.parameters()) ** 0.5
        monkeypatch.setattr(Float8Gradient, "dequantize", None)
        with Ops() as ops:
            clipped = nn.utils.clip_grad_norm_(model.parameters(), norm / 2)
        monkeypatch.undo()
        assert float(clipped) == pytest.approx(norm)
        after = sum(float((parameter.grad + 0).square().sum()) for parameter in model.parameters()) ** 0.5
        assert after == pytest.approx(norm / 2, rel=1e-4)
        found.append(ops.found)
    assert found[0] == found[1]
    assert {name: found[1][name] for name in ("_foreach_norm", "linalg_vector_norm", "_foreach_mul_", "mul_")} == {
        "_foreach_norm": 1, "linalg_vector_norm": 1, "_foreach_mul_": 1, "mul_": 0,
    }  # fmt: skip
