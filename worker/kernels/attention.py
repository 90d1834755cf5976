"""Causal attention of packed documents: a token attends to its own document, up to itself. No mask is held.

Where documents begin is one list for all rows, as flash attention takes it (Dao 2023, arXiv 2307.08691, and
`torch.nn.attention.varlen`), so time and memory grow with the lengths of documents and not with the square of a row's.
Shape suffixes: B rows, q query tokens and k key tokens of each, H query heads, G heads of keys and values, d elements of a
head, N documents of all rows.
"""

from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels.library import define


def takes_flash(query: Tensor) -> bool:
    """Return True for 16 bits and heads that flash attention takes. Other tensors on CUDA go to memory-efficient attention."""
    return query.is_cpu or (query.dtype.itemsize == 2 and query.shape[-1] <= 256)


def _fake_attention(query: Tensor, _key: Tensor, _value: Tensor, starts: Tensor, *_rest: Any) -> tuple[Tensor, ...]:
    num_rows, num_heads, num_tokens, _ = query.shape
    shape: tuple[int, ...] = (num_heads, num_rows * num_tokens)
    if not takes_flash(query):
        shape = (len(starts) - 1, num_heads, -(-num_tokens // 32) * 32)
    return _empty(query), query.new_empty(shape, dtype=torch.float32)


def _fake_backward(_grad: Tensor, heads: list[Tensor], *_rest: Any) -> tuple[Tensor, ...]:
    return tuple(map(_empty, heads))


def _empty(heads: Tensor) -> Tensor:
    """An uninitialized tensor in whose memory all heads of a token are neighbours."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


_WHERE = "Tensor query_starts, Tensor key_starts, float scale, int window"
_forward_op = define(
    f"document_attention(Tensor query, Tensor key, Tensor value, {_WHERE}) -> (Tensor, Tensor)", _fake_attention
)
_backward_op = define(
    f"document_attention_backward(Tensor grad, Tensor[] heads, Tensor output, Tensor logsumexp, {_WHERE})"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)


def document_attention(
    query_BHqd: Tensor,
    key_BGkd: Tensor,
    value_BGkd: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Return each query's mean of the values of its document up to it, (B, H, q, d), with gradients. H is a multiple of G.

    query_starts, key_starts: int32 (N + 1), on the tensors' device, ascending from 0: where each document begins among the
    query tokens and the key tokens of all rows, and at the end their number; without key_starts at the same places in both.
    A document may be empty in either. Its last query is at the place of its last key, so that queries may be the last part of
    a row whose keys are all there.
    scale: of the products of queries and keys; d ** -0.5 without one. window: a query attends to so many keys at most, its own
    the last of them; 0 for all.
    """
    scale = query_BHqd.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _DocumentAttention.apply(query_BHqd, key_BGkd, value_BGkd, query_starts, key_starts, scale, window)
    return output


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *where: Any) -> Tensor:
        query_starts, key_starts, ctx.scale, ctx.window = where
        # None where it would be the same tensor: Dynamo traces no function that is given one twice.
        starts = query_starts, query_starts if key_starts is None else key_starts
        output, logsumexp = _forward_op(query, key, value, *starts, ctx.scale, ctx.window)
        ctx.save_for_backward(query, key, value, output, logsumexp, *starts)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = ctx.saved_tensors
        return *_backward_op(grad, [query, key, value], *rest, ctx.scale, ctx.window), None, None, None, None
