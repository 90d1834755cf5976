"""A collective inside of blocks: in compiled graphs an op of torch that names its axis.

A graph holds the axis' key, and to the compiler the op is opaque: it runs the collective of eager code, so waits and bytes are
counted alike. Ranks need not run the same graphs. In each block a collective works on what follows from the result of the one
before, so no compiler can change their order, and a rank that compiles again, or runs a block eagerly, meets the others.
"""

import torch
from torch import Tensor

from worker.kernels.library import define_composite
from worker.mesh.axis import Axis, axis_of


def sum_over(partial: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks of an axis as a new contiguous tensor, in the dtype of the parts."""
    if torch.compiler.is_compiling():
        total: Tensor = _op(partial, axis.key)
        return total
    return axis.sum_(partial.clone(memory_format=torch.contiguous_format))


def _run(partial: Tensor, key: str) -> Tensor:
    return axis_of(key).sum_(partial.clone(memory_format=torch.contiguous_format))


def _fake(partial: Tensor, _key: str) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


_op = define_composite("sum_over(Tensor partial, str axis) -> Tensor", _run, _fake)
