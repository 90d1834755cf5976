"""The ops as torch sees them: what a compiler is told of their results, FLOPs, no aliases."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from worker import kernels
from worker.kernels import ops
from worker.kernels.formats import KINDS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """(op, arguments) of every op, with every kind of scale."""
    for shape in ((300, 260), (16, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for kind in KINDS:
            codes, scale = ops.quantize(x, E4M3, kind, 0, None)
            yield ops.compute_amax, (x, kind)
            yield ops.quantize, (x, E5M2, kind, 1, None)
            yield ops.quantize, (x, torch.float16, kind, 0, ops.compute_amax(x, kind))
            yield ops.encode, (x, scale, E4M3)
            yield ops.encode, (x.t(), ops.compute_amax(x.t(), kind), E4M3)
            yield ops.dequantize, (codes, scale, torch.bfloat16)
            yield ops.dequantize, (codes, scale, torch.float32)
            for sides in ("rows", "columns", "both"):
                yield ops.quantize_operand, (x, E4M3, kind, 0, sides, [])
                yield ops.quantize_operand, (x.t(), E4M3, kind, 0, sides, [])
        for is_full in ([torch.tensor(True)], [torch.tensor(False)], []):
            window = [torch.tensor(3.0), *is_full]
            yield ops.quantize_operand, (x, E4M3, "tensor", 0, "both", window)
        codes, scale = ops.quantize(x, E4M3, "row", 0, None)
        yield ops.matmul, (codes, scale, codes, scale, torch.bfloat16, False)
        yield ops.all_finite, (x,)
        yield ops.split_dequantize, (codes, torch.ones_like(codes, dtype=torch.int8), torch.tensor(0.5), torch.bfloat16)


def test_results_are_what_the_compiler_is_told() -> None:
    for op, arguments in calls():
        with FakeTensorMode() as mode:
            told = op(*tree_map_only(Tensor, mode.from_tensor, arguments))
        for real, fake in zip(tree_leaves(op(*arguments)), tree_leaves(told), strict=True):
            assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device), op
            strides = zip(real.shape, real.stride(), fake.stride(), strict=True)
            assert all(one == other for size, one, other in strides if size > 1), op


def test_results_share_no_memory() -> None:
    for op, arguments in calls():
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)}
        results = [tensor.untyped_storage().data_ptr() for tensor in tree_leaves(op(*arguments))]
        assert len(given.union(results)) == len(given) + len(results), op


@pytest.mark.parametrize("shape", [(5, 40, 33), (128, 256, 64)])
def test_a_product_counts_two_flops_for_each_multiplication(shape: tuple[int, int, int]) -> None:
    num_rows, num_summed, num_out = shape
    a, b = kernels.quantize(torch.ones(num_rows, num_summed), E4M3), kernels.quantize(torch.ones(num_out, num_summed), E4M3)
    with FlopCounterMode(display=False) as counter:
        kernels.matmul(*a, *b)
    assert counter.get_total_flops() == 2 * num_rows * num_summed * num_out
