"""Collectives inside of blocks: on tensors that autograd keeps, and in compiled graphs as torch ops that name their axis.

A graph holds the axis' key and size as constants, and each op is opaque to the compiler: it runs the same collective as eager
code, so waits and bytes are counted alike. All ranks start the collectives of a block in one order, whoever of them has compiled
it: each waits for the result of the one before.
"""

import torch
from torch import Tensor

from worker.kernels.library import define_composite
from worker.mesh.axis import Axis, axis_of
from worker.mesh.shares import sum_shares


def sum_over(partial: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks of an axis, contiguous, in the dtype of the parts."""
    if torch.compiler.is_compiling():
        total: Tensor = _sum_over(partial, axis.key)
        return total
    return axis.sum_(partial.clone(memory_format=torch.contiguous_format))


def gather_over(own_S: Tensor, axis: Axis) -> Tensor:
    """Gather all ranks' shares, by rank: (R, S)."""
    if torch.compiler.is_compiling():
        gathered_RS: Tensor = _gather_over(own_S, axis.key, axis.size)
        return gathered_RS
    return axis.start_gather(own_S).wait()


def sum_shares_over(parts_RS: Tensor, axis: Axis) -> Tensor:
    """`sum_shares`: this rank's share of the sum, (S)."""
    if torch.compiler.is_compiling():
        total_S: Tensor = _sum_shares_over(parts_RS, axis.key)
        return total_S
    return sum_shares(parts_RS, axis)


def _run_sum(partial: Tensor, key: str) -> Tensor:
    return axis_of(key).sum_(partial.clone(memory_format=torch.contiguous_format))


def _run_gather(own_S: Tensor, key: str, _size: int) -> Tensor:
    return axis_of(key).start_gather(own_S).wait()


def _run_sum_shares(parts_RS: Tensor, key: str) -> Tensor:
    return sum_shares(parts_RS.contiguous(), axis_of(key))


def _fake_sum(partial: Tensor, _key: str) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


def _fake_gather(own_S: Tensor, _key: str, size: int) -> Tensor:
    return own_S.new_empty((size, *own_S.shape))


def _fake_sum_shares(parts_RS: Tensor, _key: str) -> Tensor:
    return parts_RS.new_empty(parts_RS.shape[1:])


_sum_over = define_composite("sum_over(Tensor partial, str axis) -> Tensor", _run_sum, _fake_sum)
_gather_over = define_composite("gather_over(Tensor own, str axis, int size) -> Tensor", _run_gather, _fake_gather)
_sum_shares_over = define_composite("sum_shares_over(Tensor parts, str axis) -> Tensor", _run_sum_shares, _fake_sum_shares)
