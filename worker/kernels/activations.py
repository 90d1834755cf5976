"""The activations that a layer can compute right before it quantizes, and their derivatives, as torch has them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class Activation(NamedTuple):
    """A function and its derivative. backward: (gradient of the output, input) -> gradient of the input."""

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
