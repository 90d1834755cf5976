"""Causal attention of packed documents by torch's kernels: the ops below `torch.nn.attention.varlen` and nested tensors.

The functions above them differ between torch 2.11 and 2.13, these do not; `torch.nn.attention.activate_flash_attention_impl`
replaces them. The longest document may be as long as a row: kernels take that as a bound, so the host needs no length, and all
batches share a shape. Programs beyond a document's end return at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import current_flash_attention_impl

from octet.worker.kernels.attention import takes_flash

aten = torch.ops.aten
CAUSAL_FROM_BOTTOM_RIGHT = 2
"""A mask type of memory-efficient attention: the last query sees the last key, as in flash attention."""


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, q, d), and the logarithms of sums, fp32."""
    where = query_starts, key_starts, query.shape[2], key.shape[2], 0.0
    heads = _tokens(query), _tokens(key), _tokens(value)
    if takes_flash(query):
        output, logsumexp, *_ = aten._flash_attention_forward(*heads, *where, True, False, scale=scale, **_flash_window(window))
        return _rows(output, query), logsumexp
    if (chosen := current_flash_attention_impl()) is not None:
        raise ValueError(
            f"{chosen} was chosen for attention, and documents attend by {query.dtype} heads of {query.shape[-1]} elements; "
            "allowed: 16 bits and 256 elements. Set training.attention_kernel to torch."
        )
    options = {"scale": scale, "window_size": window or None}
    output, logsumexp, *_ = aten._efficient_attention_forward(
        *_each_alone(*heads), None, *where, CAUSAL_FROM_BOTTOM_RIGHT, True, **options
    )
    return _rows(output.squeeze(0), query), logsumexp


def document_attention_backward(
    grad: Tensor,
    heads: list[Tensor],
    output: Tensor,
    logsumexp: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value (`heads`), in their shapes."""
    query = heads[0]
    where = query_starts, key_starts, query.shape[2], heads[1].shape[2]
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
    tokens, grad, output = tuple(map(_tokens, heads)), _tokens(grad), _tokens(output)
    if takes_flash(query):
        options: tuple[Any, ...] = *where, 0.0, True, seed, seed.new_empty(0)
        windows = _flash_window(window)
        grads = aten._flash_attention_backward(grad, *tokens, output, logsumexp, *options, scale=scale, **windows)
    else:
        tokens = _each_alone(*tokens)
        options = *where, logsumexp, 0.0, *seed.view(torch.int64).unbind(), CAUSAL_FROM_BOTTOM_RIGHT, False
        named = {"scale": scale, "window_size": window or None}
        grads = aten._efficient_attention_backward(grad.unsqueeze(0), *tokens, None, output.unsqueeze(0), *options, **named)
        grads = [found.squeeze(0).unflatten(1, (of.shape[1], -1)).sum(2) for found, of in zip(grads, heads, strict=False)]
    return tuple(_rows(found, of) for found, of in zip(grads, heads, strict=True))


def _flash_window(window: int) -> dict[str, int]:
    """Flash attention counts the keys before a query's own, and those after it."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _tokens(heads_BHTd: Tensor) -> Tensor:
    """The heads of all tokens, (B · T, H, d), with zeros up to a multiple of 8 elements, which kernels need."""
    tokens_NHd, num_missing = heads_BHTd.transpose(1, 2).flatten(0, 1), -heads_BHTd.shape[-1] % 8
    return functional.pad(tokens_NHd, (0, num_missing)) if num_missing else tokens_NHd


def _rows(tokens_NHd: Tensor, like_BHTd: Tensor) -> Tensor:
    num_rows, _, num_tokens, head_size = like_BHTd.shape
    return tokens_NHd.narrow(2, 0, head_size).contiguous().unflatten(0, (num_rows, num_tokens)).transpose(1, 2)


def _each_alone(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return one row, with a head of keys for each query head: memory-efficient attention knows no groups."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = (heads if num_groups == 1 else heads.repeat_interleave(num_groups, dim=1) for heads in (key, value))
    return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
