"""Let an optimizer hold a piece of each parameter: its states, and the updates, of some of the elements (ZeRO).

A piece is a 1-D parameter that shares memory with the model's, so that a step writes into the model. It keeps the origin of
the whole: it draws the same random numbers and has the same codecs. States of pieces, put together, are those of the whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from worker.deferred import sliceable
from worker.optim.codecs import select_entries
from worker.optim.optimizer import LowBitOptimizer
from worker.optim.weights import QuantizedWeight


def cut_into_pieces(optimizer: LowBitOptimizer, elements: Mapping[nn.Parameter, range]) -> None:
    """Replace parameters by pieces in the optimizer's groups; `optimizer.pieces` tells which. Other parameters stay.

    elements: those that each piece holds, maybe none; they start at a multiple of 128. Raises ValueError, before anything is
    changed, for a parameter that is not contiguous.
    """
    for parameter in elements:
        if not parameter.is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; allowed: contiguous ones, "
                "which can be cut by elements. Make it contiguous, or use zero_stage=0."
            )
    for group in optimizer.param_groups:
        group["params"] = [_cut(optimizer, held, elements[held]) if held in elements else held for held in group["params"]]


def make_piece(parameter: nn.Parameter, elements: range) -> nn.Parameter:
    """Some elements of a contiguous parameter as a parameter, 1-D, in the same memory."""
    with sliceable(parameter):
        piece = nn.Parameter(parameter.detach().view(-1)[elements.start : elements.stop], parameter.requires_grad)
    piece.grad_dtype = parameter.grad_dtype
    return piece


def shares_memory(piece: Tensor, parameter: Tensor, first_element: int) -> bool:
    """Whether a piece still lies in the parameter's memory: a move to another device, or an assignment, ends that."""
    return piece.numel() == 0 or piece.data_ptr() == parameter.data_ptr() + first_element * parameter.element_size()


def _cut(optimizer: LowBitOptimizer, parameter: nn.Parameter, elements: range) -> nn.Parameter:
    piece = make_piece(parameter, elements)
    origin = optimizer._origins.pop(parameter)
    optimizer._origins[piece] = origin._replace(first_element=elements.start)
    if parameter in optimizer._quantized:
        weight = optimizer._quantized.pop(parameter)
        optimizer._quantized[piece] = QuantizedWeight(weight.holder, piece, elements)
    if parameter in optimizer.state:
        state = optimizer.state.pop(parameter)
        optimizer.state[piece] = {
            name: _copied(select_entries(value, elements)) if isinstance(value, dict) else value
            for name, value in state.items()
        }
    optimizer.pieces[parameter] = piece
    return piece


def _copied(parts: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """Copies, so that the memory of the whole is released."""
    return {name: part.clone() for name, part in parts.items()}
