"""Norms in bf16, as Transformer Engine's LayerNorm has them: weights and outputs in bf16, statistics in fp32.

An fp32 norm hands fp32 activations to what follows it, 4 bytes an element that wait for the backward pass. torch's LayerNorm
and RMSNorm are known by their classes. An RMSNorm of another package is known by its parts and by what it computes of random
numbers, since some multiply by `1 + weight`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from octet.worker.common.deferred import deferred, is_deferred
from octet.worker.fp8.convert import SkippedLayer, put_in_place

_EPS = ("eps", "variance_epsilon")
"""The names that RMSNorms give to the number that they add to the mean square."""


class HalfNorm(nn.Module):
    """Takes over the parameters of a norm and casts them: weight (C) and, of a LayerNorm, bias (C), both bf16."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.is_layer_norm = type(norm) is nn.LayerNorm
        self.weight = norm._parameters.get("weight")
        self.bias = norm._parameters.get("bias")
        self.normalized_shape = _shape_of(norm)
        self.eps = eps_of(norm)
        for parameter in self.parameters():
            gradient, parameter.grad = parameter.grad, None
            values = parameter.data
            has_memory = not is_deferred(values)
            parameter.data = (
                values.to(torch.bfloat16) if has_memory else deferred(tuple(values.shape), torch.bfloat16, values.device)
            )
            parameter.grad = None if gradient is None else gradient.to(torch.bfloat16)
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions of an input of any floating dtype. The output is bf16, in its shape."""
        with torch.autocast(input.device.type, enabled=False):
            weight: Tensor | None = self.weight
            bias: Tensor | None = self.bias
            if weight is None or weight.dtype != input.dtype:
                input = input.float()
                weight = None if weight is None else weight.float()
                bias = None if bias is None else bias.float()
            if self.is_layer_norm:
                output = functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps or 0.0)
            else:
                output = functional.rms_norm(input, self.normalized_shape, weight, self.eps)
            return output.to(torch.bfloat16)

    def extra_repr(self) -> str:
        kind = "layer norm" if self.is_layer_norm else "RMS norm"
        return f"{kind} of {tuple(self.normalized_shape)}, eps={self.eps}, output=bf16"


def select_norms(model: nn.Module) -> tuple[list[str], list[SkippedLayer]]:
    """Split the norms of a model into those that can be in bf16 and those that stay, with the reason. Changes nothing.

    Raises ValueError where there is none to convert.
    """
    norms = [(name, module) for name, module in model.named_modules() if name and is_norm(module)]
    reasons = {name: why_kept(norm) for name, norm in norms}
    selected = [name for name, reason in reasons.items() if reason is None]
    kept = [SkippedLayer(name, reason) for name, reason in reasons.items() if reason is not None]
    if not selected:
        found = "; ".join(f"{norm.name}: {norm.reason}" for norm in kept) or "it has none"
        raise ValueError(f"norms is bf16 and no norm of the model can be ({found}); allowed: fp32. Leave norms out.")
    return selected, kept


def replace_norms(model: nn.Module, names: list[str]) -> None:
    """Put norms in bf16 in the place of the named ones; the parameter objects stay."""
    put_in_place(model, {norm: HalfNorm(norm) for norm in map(model.get_submodule, names)})


def is_norm(module: nn.Module) -> bool:
    """Return whether a module without parts is called a norm."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def why_kept(norm: nn.Module) -> str | None:
    """Return why a norm is not a plain LayerNorm or RMSNorm with fp32 weights; None if it is one."""
    parameters = dict(norm.named_parameters(recurse=False))
    if any(hooks for attribute, hooks in vars(norm).items() if "_hooks" in attribute and hooks) or "forward" in vars(norm):
        return "it has hooks, or a forward of its own, which would be lost"
    if any(parameter.dtype != torch.float32 for parameter in parameters.values()):
        return "its weight is not fp32"
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        return None
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or dict(norm.named_buffers()) or eps_of(norm) is None:
        return f"{type(norm).__name__} is neither torch's LayerNorm or RMSNorm nor has a weight and an epsilon alone"
    return None if _is_rms_norm(norm) else f"{type(norm).__name__} computes something else than an RMS norm"


def _is_rms_norm(norm: nn.Module) -> bool:
    """Return whether a module with one weight (C) gives the RMS norm of random numbers, within fp32's rounding."""
    [num_features] = norm.get_parameter("weight").shape
    draw = torch.Generator().manual_seed(0)
    input, weight = torch.randn(4, num_features, generator=draw), torch.randn(num_features, generator=draw)
    try:
        with torch.no_grad():
            output = functional_call(norm, {"weight": weight}, (input,))
    except (RuntimeError, TypeError, ValueError):  # it takes something else than an input
        return False
    expected = functional.rms_norm(input, (num_features,), weight, eps_of(norm))
    return (
        isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-5, atol=1e-6)
    )


def _shape_of(norm: nn.Module) -> tuple[int, ...]:
    given: Any = getattr(norm, "normalized_shape", None)
    return tuple(norm.get_parameter("weight").shape if given is None else given)


def eps_of(norm: nn.Module) -> float | None:
    """The number that a norm adds to the mean square; None where it has none of its own."""
    values = [getattr(norm, name) for name in _EPS if isinstance(getattr(norm, name, None), float)]
    return values[0] if values else None
