"""The layout of a linear layer's weight: `nn.Linear` stores (N, K), Hugging Face's `Conv1D` (GPT-2) stores (K, N).

A converted layer keeps the parameter as it is, so that checkpoints and optimizers see no difference.
"""

import importlib
from typing import NamedTuple

import torch
from torch import nn

CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""Module and name of the class, which is recognised without importing transformers."""
PLAIN_SUBCLASSES = frozenset(
    {
        ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
        ("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear"),
    }
)
"""Subclasses of `nn.Linear` that compute what it computes. FalconLinear only rounds before it adds the bias; torch's is the
output of its attention."""


class Layout(NamedTuple):
    """K and N of a linear layer, and whether its weight is (K, N)."""

    in_features: int
    out_features: int
    is_transposed: bool


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of a linear layer, or of a subclass of one; None for any other module."""
    if isinstance(module, nn.Linear):
        return Layout(module.in_features, module.out_features, is_transposed=False)
    if any(_is_conv1d(base) for base in type(module).__mro__):
        in_features, out_features = module.get_parameter("weight").shape
        return Layout(in_features, out_features, is_transposed=True)
    return None


def conv1d_of(weight_KN: nn.Parameter, bias_N: nn.Parameter) -> nn.Module:
    """Return a `Conv1D` that holds a weight (K, N) and a bias as they are."""
    conv1d = getattr(importlib.import_module(CONV1D[0]), CONV1D[1])
    with torch.device("meta"):
        made: nn.Module = conv1d(weight_KN.shape[1], weight_KN.shape[0])
    made.weight, made.bias = weight_KN, bias_N
    return made


def is_known_class(module: nn.Module) -> bool:
    """Return True if a module is an `nn.Linear` or `Conv1D`, or of a subclass that is known to compute the same.

    Another subclass may compute something else.
    """
    name = (type(module).__module__, type(module).__name__)
    return type(module) is nn.Linear or name in PLAIN_SUBCLASSES or _is_conv1d(type(module))


def _is_conv1d(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == CONV1D
