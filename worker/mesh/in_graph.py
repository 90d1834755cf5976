"""A collective inside of blocks, which a compiled graph holds as an op of torch that names its axis.

To the compiler the op is opaque: it runs the collective of eager code, so waits and bytes are
counted alike. A graph keeps the order of two collectives if one depends on the result of the other.
The graph chooses the order of the rest, such as those for the gradients of an input that several
layers share. That order is the same on all ranks of an axis: they take the same steps with the same
shapes, statistics and demotions, so they compile the same graphs.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from octet.worker.kernels.library import define_composite
from octet.worker.mesh.axis import Axis

_AXES: WeakValueDictionary[str, Axis] = WeakValueDictionary()
_KEYS: WeakKeyDictionary[Axis, str] = WeakKeyDictionary()
_NUMBERS: defaultdict[str, Iterator[int]] = defaultdict(count)
"""The next number of an axis in its key, by the axis' name."""


class AxisInBlocks:
    """An axis whose ranks meet inside of blocks, eager or compiled."""

    def __init__(self, axis: Axis) -> None:
        if axis not in _KEYS:
            _KEYS[axis] = f"{axis.name}-{next(_NUMBERS[axis.name])}"
        self.axis, self.key = axis, _KEYS[axis]
        _AXES[self.key] = axis

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks as a new contiguous tensor, in the dtype of the parts."""
        if torch.compiler.is_compiling():
            total: Tensor = _sum_in_graph(partial, self.key)
            return total
        return self.axis.sum_(partial.clone(memory_format=torch.contiguous_format))


def _sum(partial: Tensor, key: str) -> Tensor:
    return _AXES[key].sum_(partial.clone(memory_format=torch.contiguous_format))


def _fake_sum(partial: Tensor, _key: str) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


_sum_in_graph = define_composite("sum_over(Tensor partial, str axis) -> Tensor", _sum, _fake_sum)
