"""Elementwise functions between layers, by name, with their derivatives: what a layer takes over to compute them again."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class Activation(NamedTuple):
    """backward: the gradient of the input, from that of the output and from the input."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "gelu": Activation(F.gelu, aten.gelu_backward.default),
    "gelu-tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward.default(grad, x, approximate="tanh"),
    ),
    "relu": Activation(F.relu, lambda grad, x: aten.threshold_backward.default(grad, x, 0)),
    "silu": Activation(F.silu, aten.silu_backward.default),
}
