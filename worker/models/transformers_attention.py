"""Attention of transformers' decoders by our op: documents and windows end it, and no mask is made.

transformers takes a function by its public registry (`AttentionInterface.register`). A mask of four dimensions comes to it as
it was passed to the network: so do the starts of documents, int32 (1, 1, 1, N + 1), and none for rows of one document each. So
transformers neither looks for documents in positions, which reads a value of the device in each pass, nor fills T × T elements.
Without documents, and where a row is no longer than a layer's window, torch's causal attention computes what it did. Whoever
calls the network with another mask, or with none, gets the mask that transformers makes of it for torch's attention: padding
is not attended to.
Shape suffixes: B rows, H query heads, G heads of keys and values, T tokens, d elements of a head, N documents of all rows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from octet.api_schemas.models.architectures import KEEPS_DOCUMENTS_APART
from octet.worker.kernels import document_attention
from octet.worker.models.documents import document_spans

NAME = "octet_documents"


def attend_by_documents(network: Any) -> None:
    """Let a network of transformers attend by `attend`, if its architecture is one that a test shows to be right so."""
    if network.config.model_type in KEEPS_DOCUMENTS_APART:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        network.set_attn_implementation(NAME)


def attends_by_documents(network: Any) -> bool:
    """Return True if a network of transformers attends by `attend` now."""
    return bool(network.config._attn_implementation == NAME)


def mask_of(documents_BD: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """Return what the network takes as attention_mask, for `attend`. documents_BD: as `documents.py` describes, or None."""
    if documents_BD is None:
        starts = torch.empty(0, dtype=torch.int32, device=tokens_BT.device)
    else:
        (spans,) = document_spans(documents_BD, [(0, tokens_BT.shape[1])])
        starts = spans.query_starts
    return starts[None, None, None]


def attend(
    module: nn.Module,
    query_BHTd: Tensor,
    key_BGTd: Tensor,
    value_BGTd: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the mean of the values up to each query, (B, T, H, d), as transformers calls a function of its registry.

    attention_mask: `mask_of` documents; or, from whoever calls the network, what transformers makes for torch's attention.
    options: `scaling` of the products, `dropout` and `sliding_window` are used. Where attention drops values, which the op does
    not, a mask is made.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query_BHTd, key_BGTd, value_BGTd, attention_mask, **options)
    num_rows, _, num_tokens, size = query_BHTd.shape
    window = options.get("sliding_window") or 0
    window = window if window < num_tokens else 0
    starts = attention_mask.flatten() if attention_mask.numel() else None
    if starts is None and window:
        starts = torch.arange(0, (num_rows + 1) * num_tokens, num_tokens, dtype=torch.int32, device=query_BHTd.device)
    if starts is None or options.get("dropout"):
        mask = None if starts is None else _mask(starts, num_rows, num_tokens, window)
        return sdpa_attention_forward(module, query_BHTd, key_BGTd, value_BGTd, mask, **options)
    dtype, value_size = value_BGTd.dtype, value_BGTd.shape[-1]  # a norm in fp32 may have written queries and keys
    value_BGTd = functional.pad(value_BGTd, (0, size - value_size)) if value_size < size else value_BGTd
    heads = query_BHTd.to(dtype), key_BGTd.to(dtype), value_BGTd
    mixed_BHTd = document_attention(*heads, starts, scale=options.get("scaling"), window=window)
    return mixed_BHTd[..., :value_size].transpose(1, 2).contiguous(), None


def _mask(starts: Tensor, num_rows: int, num_tokens: int, window: int) -> Tensor:
    """Return True where a token attends to another, (B, 1, T, T). starts: of the documents of all rows, int32 (N + 1)."""
    places = torch.arange(num_rows * num_tokens, dtype=torch.int32, device=starts.device)
    numbers_BT = torch.searchsorted(starts, places, right=True).view(num_rows, num_tokens)
    mask_BTT = (numbers_BT[:, :, None] == numbers_BT[:, None, :]).tril()
    return (mask_BTT.triu(1 - window) if window else mask_BTT)[:, None]
