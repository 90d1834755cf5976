"""Attention of packed documents: on a CPU that of a dense mask bit for bit; fakes are as what CUDA's code returns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octet.worker.kernels import cuda, document_attention
from octet.worker.kernels.cuda import attention

STARTS = (0, 5, 6, 24, 24, 24, 34, 44, 48)
"""Two rows of 24 tokens. Two documents are empty."""
ops = torch.ops.octet


def heads(num_heads: int, num_keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 24, number, 16, generator=numbers) for number in (num_heads, num_keys, num_keys)]
    return [part.to(dtype).transpose(1, 2).requires_grad_() for part in drawn]


def dense(query: Tensor, key: Tensor, value: Tensor, first: int = 0, window: int = 24, scale: float | None = None) -> Tensor:
    """Return attention with a dense mask, of groups of heads, from the first query of each row on."""
    numbers = torch.searchsorted(torch.tensor(STARTS), torch.arange(48), right=True).view(2, 24)
    mask = (numbers[:, :, None] == numbers[:, None, :]).tril().triu(1 - window)[:, None, first:]
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def gradients(output: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, of, torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_keys", [4, 2])
@pytest.mark.parametrize(("window", "scale"), [(0, None), (3, 0.3)])
def test_values_and_gradients_are_those_of_a_dense_mask(dtype: torch.dtype, num_keys: int, window: int, scale: Any) -> None:
    parts, starts = heads(4, num_keys, dtype), torch.tensor(STARTS, dtype=torch.int32)
    found = document_attention(*parts, starts, starts, scale=scale, window=window)
    expected = dense(*parts, window=window or 24, scale=scale)
    assert torch.equal(found, expected)
    for gradient, of_dense in zip(gradients(found, parts), gradients(expected, parts), strict=True):
        assert torch.equal(gradient, of_dense)


def test_the_last_queries_of_rows_see_the_keys_before_them() -> None:
    """Ranks that divide the tokens attend so. Documents that end before the queries have keys alone."""
    query, key, value = heads(4, 2)
    starts = torch.tensor(STARTS, dtype=torch.int32)
    of_queries = torch.tensor([0, 0, 0, 8, 8, 8, 8, 12, 16], dtype=torch.int32)
    found, expected = (
        document_attention(query[:, :, 16:], key, value, of_queries, starts, window=10),
        dense(query[:, :, 16:], key, value, 16, window=10),
    )
    torch.testing.assert_close(found, expected)
    for gradient, of_dense in zip(gradients(found, [key, value]), gradients(expected, [key, value]), strict=True):
        torch.testing.assert_close(gradient, of_dense)


def test_ops_are_what_torch_expects_of_ops() -> None:
    parts, starts = [part.detach() for part in heads(4, 2)], torch.tensor(STARTS, dtype=torch.int32)
    where = starts, starts, 0.25, 7
    torch.library.opcheck(ops.document_attention.default, (*parts, *where))
    output, logsumexp = ops.document_attention(*parts, *where)
    torch.library.opcheck(ops.document_attention_backward.default, (output, parts, output, logsumexp, *where))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 16), (torch.bfloat16, 20), (torch.float32, 16), (torch.bfloat16, 264)]
)
@pytest.mark.parametrize("window", [0, 8])
def test_fakes_have_the_shapes_and_strides_of_what_cuda_runs(
    dtype: torch.dtype, size: int, window: int, monkeypatch: Any
) -> None:
    """Flash attention, padded heads, and memory-efficient attention for what flash attention does not take."""

    class Aten:
        """Torch's ops, but for one whose fake lacks an argument."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops.aten, name)

        def _efficient_attention_backward(self, _grad: Tensor, *arguments: Any, **_options: Any) -> list[Tensor]:
            return [torch.empty_like(part) for part in arguments[:3]]

    monkeypatch.setattr(attention, "aten", Aten())
    parts = [torch.empty(2, 24, number, size, dtype=dtype, device="meta").transpose(1, 2) for number in (4, 2, 2)]
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    where, found = (starts, starts, 0.25, window), []
    for module in (cuda, ops):
        output, logsumexp = module.document_attention(*parts, *where)
        grads = module.document_attention_backward(torch.empty_like(output), parts, output, logsumexp, *where)
        found.append([(part.shape, part.stride(), part.dtype) for part in (output, logsumexp, *grads)])
    assert found[0] == found[1]
