"""Find out, at the cost of a few lookups, if a step can use the last step's tables of addresses (`fused.py`).

Everything that the tables name may be replaced between two steps: by a move, a load, an exchange of
`.data`, ZeRO, a user. So each step compares all of it with the last step: the objects, their
addresses, and the dtypes and sizes of parameters. Gradients are not compared; `Rows` reads their
addresses in each step.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain, compress
from operator import is_, not_
from typing import Any

from torch import Tensor

from octet.worker.fp8.weight import stored
from octet.worker.optim.fused import Rows
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.states import OptimizerStates

_Updates = Sequence[tuple[Tensor, Group]]


class AddressCache:
    """The inputs of one step's tables, apart from gradients and hyperparameters. rows: the rows made from them.

    Only the addresses of tensors are kept, so that the memory of a state that was replaced is not
    kept.
    """

    def __init__(self, optimizer: OptimizerStates, updates: _Updates, rows: Rows) -> None:
        """updates: each parameter of the step and its group, in the order of the rows."""
        self.rows = rows
        weights = map(optimizer.quantized.get, [parameter for parameter, _ in updates])
        self._weights = [weight for weight in weights if weight is not None]
        self._written = [weight.weight.state for weight in self._weights]
        self._objects, self._values = self._identify(optimizer, updates), self._read(optimizer, updates)

    def is_unchanged(self, optimizer: OptimizerStates, updates: _Updates) -> bool:
        """Return True if a step of these updates would read the same, and has no master weight to renew."""
        objects = self._identify(optimizer, updates)
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._read(optimizer, updates) == self._values
            and not any(state.wide is not None or state.is_replaced for state in self._written)
            and not any(state.has_master and state.has_new_codes for state in self._written)
        )

    def _identify(self, optimizer: OptimizerStates, updates: _Updates) -> list[Any]:
        """Return, in a fixed order, what is compared by identity: states on the host, groups, parameters and weights.

        Of what the optimizer holds by parameter, keys and values are listed: a look-up of a tensor calls Python.
        """
        origins, weights = optimizer.origins, optimizer.quantized
        held = chain(*updates, origins, origins.values(), weights, weights.values(), optimizer.state)
        return [optimizer.host_states, *optimizer.param_groups, *held]

    def _read(self, optimizer: OptimizerStates, updates: _Updates) -> list[Any]:
        """Return what is compared by value: addresses, the rest that rows depend on, codecs of groups, and `fused`."""
        parameters = [stored(parameter) for parameter, _ in updates]
        parts: list[Any] = []
        for weight in self._weights:
            parts += (weight.dequant_scale, weight.amax, weight.residual, weight.elements)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, dict):
                    parts += value.values()
                else:
                    parts.append(value)
        are_tensors = [*map(_is_tensor, map(type, parts))]
        return [
            are_tensors,
            [*map(Tensor.data_ptr, parameters)],
            [*map(Tensor.data_ptr, compress(parts, are_tensors))],
            [*compress(parts, map(not_, are_tensors))],
            [parameter.dtype for parameter in parameters],
            [*map(Tensor.numel, parameters)],
            [*map(Tensor.is_contiguous, parameters)],
            [optimizer.codec_names(group) for group in optimizer.param_groups],
            optimizer.fused,
        ]


@cache
def _is_tensor(kind: type) -> bool:
    """Return True for a class of tensors. Cached, since torch takes longer for this check than all else done to a part."""
    return issubclass(kind, Tensor)
