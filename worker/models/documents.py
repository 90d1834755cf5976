"""Several documents in one sequence: positions and attention that end at a document's border.

A batch says by "documents", int32 (B, D), where the documents of each row begin, ascending from 0; a row of fewer is filled up
with the row's length. The host makes it, and D is the same for all batches of a source, so no step waits for a number of
documents and all have one shape.
Shape suffixes: B sequences, T tokens, D documents of a row, N of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class DocumentSpans(NamedTuple):
    """Starts of documents among queries and keys, as `kernels.document_attention` takes it, int32 (N + 1) each."""

    query_starts: Tensor
    key_starts: Tensor


Spans = tuple[DocumentSpans, ...]
"""The spans of each range of this rank's queries; one without context parallelism."""


def document_starts(numbers_BT: Tensor, num_starts: int | None = None) -> Tensor:
    """Return a batch's "documents" on the host, int32 (B, D), from the number of each token's document.

    num_starts: D; without it the most documents of a row.
    """
    begins_BT = torch.ones_like(numbers_BT, dtype=torch.bool)
    begins_BT[:, 1:] = numbers_BT[:, 1:] != numbers_BT[:, :-1]
    ordinals_BT = begins_BT.cumsum(1)
    shape = len(numbers_BT), num_starts or int(ordinals_BT.max())
    starts_BD = torch.full(shape, numbers_BT.shape[1], dtype=torch.int32)
    rows, places = begins_BT.nonzero(as_tuple=True)
    starts_BD[rows, ordinals_BT[rows, places] - 1] = places.to(torch.int32)
    return starts_BD


def document_numbers(documents_BD: Tensor, num_tokens: int) -> Tensor:
    """Return the number of each token's document in its row, from 0, int64 (B, T). Raises ValueError for other documents."""
    if documents_BD.dtype != torch.int32 or documents_BD.dim() != 2:
        raise ValueError(
            f"documents is {documents_BD.dtype} {tuple(documents_BD.shape)}; allowed: torch.int32 (rows, documents), where the "
            "documents of each row begin. Pass what `document_starts` makes of the numbers of the tokens' documents."
        )
    places_T = torch.arange(num_tokens, dtype=torch.int32, device=documents_BD.device)
    places_BT = places_T.expand(len(documents_BD), num_tokens).contiguous()
    return torch.searchsorted(documents_BD.contiguous(), places_BT, right=True) - 1


def positions_in_documents(documents_BD: Tensor, num_tokens: int) -> Tensor:
    """Return each token's position in its document, from 0, int64 (B, T)."""
    numbers_BT = document_numbers(documents_BD, num_tokens)
    return torch.arange(num_tokens, device=documents_BD.device) - documents_BD.gather(1, numbers_BT)


def document_spans(documents_BD: Tensor, ranges: Sequence[tuple[int, int]]) -> Spans:
    """Return the spans of each range of queries, which has all keys up to its end. ranges: first and end in a row."""
    return tuple(
        DocumentSpans(_starts_within(documents_BD, first, end), _starts_within(documents_BD, 0, end)) for first, end in ranges
    )


def _starts_within(documents_BD: Tensor, first: int, end: int) -> Tensor:
    length, num_rows = end - first, len(documents_BD)
    rows_B1 = torch.arange(0, num_rows * length, length, dtype=torch.int32, device=documents_BD.device)[:, None]
    starts_BD = documents_BD.clamp(first, end) - first + rows_B1
    return functional.pad(starts_BD.flatten(), (0, 1), value=num_rows * length)
