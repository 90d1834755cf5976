"""Random initial values by parameter, so that a rank can draw one parameter at a time and pass over what it does not hold.

All parameters of a model are drawn from one generator on the CPU, in the model's order. Whoever skips a parameter advances the
generator by as many numbers as drawing it would take.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_CHUNK = 1 << 20
"""Numbers that are passed over at a time."""
_VECTOR = 16
"""torch's CPU draws that many normal numbers at a time; the last ones again if the number of elements is no multiple."""


class Normal(NamedTuple):
    """N(0, std²)."""

    std: float


class Constant(NamedTuple):
    """One value for all elements."""

    value: float


Initial = Normal | Constant


def draw_parameters(model: nn.Module, initial: Callable[[str, int], Initial], seed: int) -> None:
    """Give all parameters of a model on the CPU their initial values. On `meta` nothing is drawn.

    initial: of a parameter's name and number of dimensions.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            draw(parameter, initial(name, parameter.dim()), generator)


@torch.no_grad()
def draw(tensor: Tensor, initial: Initial, generator: torch.Generator) -> Tensor:
    """Fill a tensor on the CPU. Returns it."""
    match initial:
        case Normal(std):
            return tensor.normal_(0.0, std, generator=generator)
        case Constant(value):
            return tensor.fill_(value)


def skip(num_elements: int, initial: Initial, generator: torch.Generator) -> None:
    """Leave the generator as `draw` leaves it for an fp32 tensor of so many elements. It takes a sixth of the time."""
    if isinstance(initial, Constant):
        return
    if num_elements < _VECTOR or not _is_countable():
        torch.empty(num_elements).normal_(generator=generator)
    else:
        _pass_over(num_elements, generator)


def _pass_over(num_elements: int, generator: torch.Generator) -> None:
    """Take one number for each element, and for the last vector those that torch draws again."""
    left = num_elements + (_VECTOR if num_elements % _VECTOR else 0)
    bits = torch.empty(min(left, _CHUNK), dtype=torch.uint8)
    while left:
        bits[:left].random_(generator=generator)
        left -= min(left, len(bits))


@cache
def _is_countable() -> bool:
    """Return True if this torch draws as many numbers as `_pass_over` counts; else `skip` draws them and drops them."""
    drawn, counted = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for num_elements in (_VECTOR, 3 * _VECTOR + 1):
        torch.empty(num_elements).normal_(generator=drawn)
        _pass_over(num_elements, counted)
    return torch.equal(drawn.get_state(), counted.get_state())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that this thread's modules register on `meta`; buffers stay where they are made."""
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()
